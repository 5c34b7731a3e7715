"""`ipu_print_tensor`: when it prints, and the format."""

from __future__ import annotations

import poptorch
import pytest
import torch
from poptorch.ops.printing import PrintFormat
from poptorch_models import Line, options

DEFAULT = PrintFormat(1000, 3, 80, 4, "auto", ", ", "(", ")")


class Printing(Line):
    def __init__(self, print_gradient: bool = True) -> None:
        super().__init__()
        self.print_gradient = print_gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(poptorch.ipu_print_tensor(x * self.weight, "x", self.print_gradient))


def test_every_run_prints_value_and_gradient_but_compilation_prints_nothing(capsys):
    training = poptorch.trainingModel(Printing(), options(), torch.optim.SGD(Line().parameters(), lr=0.0))
    training.compile(torch.ones(2))
    assert capsys.readouterr().err == ""
    training(torch.ones(2))
    assert capsys.readouterr().err == "x: (1.0000, 1.0000)\nx_gradient: (0.5000, 0.5000)\n"


def test_every_replica_and_iteration_prints(capsys):
    inference = poptorch.inferenceModel(Printing(), options(replicas=2, iterations=2))
    inference(torch.arange(4.0))
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [f"x: ({value}.0000)" for value in range(4)]


def test_print_gradient_false_prints_the_value_only(capsys):
    poptorch.trainingModel(Printing(print_gradient=False), options())(torch.ones(1))
    assert capsys.readouterr().err == "x: (1.0000)\n"


def test_on_the_host_it_is_the_identity(capsys):
    x = torch.ones(2, requires_grad=True)
    poptorch.ipu_print_tensor(x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tensor", "settings", "text"),
    [
        (torch.tensor(1.5), {}, "1.5000"),
        (torch.tensor([[1, -20], [3, 4]]), {}, "((  1, -20),\n (  3,   4))"),
        (torch.tensor([True, False]), {}, "(1, 0)"),
        (torch.zeros(0), {}, "()"),
        (torch.tensor([0.5, float("nan"), float("inf")]), {"digits": 1}, "(0.5, nan, inf)"),
        (torch.tensor([1e-6, 1.0]), {"digits": 1}, "(1.0e-06, 1.0e+00)"),
        (torch.tensor([1e-6, 1.0]), {"digits": 1, "float_format": "fixed"}, "(0.0, 1.0)"),
        (torch.tensor([2.0]), {"digits": 2, "float_format": "scientific"}, "(2.00e+00)"),
        (torch.tensor([0.5]), {"float_format": "none"}, "(0.5)"),
        (torch.arange(9), {"summarise_threshold": 8, "edge_items": 2}, "(0, 1, ..., 7, 8)"),
        (torch.arange(5), {"max_line_width": 8}, "(0, 1,\n 2, 3,\n 4)"),
        (torch.arange(2), {"separator": " ", "open_bracket": "[", "close_bracket": "]"}, "[0 1]"),
    ],
)
def test_print_format(tensor, settings, text):
    assert DEFAULT._replace(**settings).text(tensor) == text


def test_summary_prints_the_edges_of_every_dimension():
    text = DEFAULT._replace(summarise_threshold=10, edge_items=1).text(torch.arange(16).reshape(4, 4))
    assert text == "(( 0, ...,  3),\n ...,\n (12, ..., 15))"


@pytest.mark.parametrize(
    "settings",
    [{"float_format": "hex"}, {"digits": -1}, {"edge_items": 1.5}, {"separator": 1}, {"max_line_width": "a"}],
)
def test_invalid_formats_raise_error(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        poptorch.ipu_print_tensor(torch.ones(1), **settings)
