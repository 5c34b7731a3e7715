"""Ops that run on the host: `CPU` and `ipu_print_tensor`."""

from __future__ import annotations

import copy
from typing import Any

import poptorch
import pytest
import torch
from poptorch.ops.host import PrintFormat
from torch import nn

from tests.support.poptorch_models import Line, options

DEFAULT_FORMAT = PrintFormat(1000, 3, 80, 4, "auto", ", ", "(", ")")


class Hosted(nn.Module):
    """Calls one of its methods on the host, between two operations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host = poptorch.CPU(self.on_host, "host")
        self.calls = 0
        self.seen: Any = None

    def on_host(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        self.seen = (x.dtype, poptorch.isRunningOnIpu(), x.cpu().numpy().tolist())
        return x.cpu() * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.host(x + 1, scale=3.0) * 2


def test_layer_runs_on_the_host_in_every_call():
    model = Hosted()
    inference = poptorch.inferenceModel(model, options())
    assert inference(torch.tensor([1.0])).tolist() == [12.0]
    assert model.seen == (torch.float32, False, [2.0])
    before = model.calls
    assert inference(torch.tensor([2.0])).tolist() == [18.0]
    assert model.calls == before + 1


def test_every_replica_calls_the_layer():
    inference = poptorch.inferenceModel(Hosted(), options(replicas=4))
    for _ in range(3):
        assert inference(torch.arange(4.0)).tolist() == [6.0, 12.0, 18.0, 24.0]


def test_layer_gets_the_dtypes_of_the_api():
    model = Hosted()
    poptorch.inferenceModel(model, options())(torch.tensor([1, 2]))
    assert model.seen[0] == torch.int32
    output = poptorch.inferenceModel(model, options())(torch.ones(1, dtype=torch.half))
    assert (model.seen[0], output.dtype, output.item()) == (torch.half, torch.half, 12.0)


def test_half_and_float_models_share_a_layer():
    model = Hosted()
    half, full = (poptorch.inferenceModel(model, options()) for _ in range(2))
    for _ in range(2):
        half(torch.ones(1, dtype=torch.half))
        assert model.seen[0] == torch.half
        full(torch.ones(1))
        assert model.seen[0] == torch.float32


def test_nested_arguments_and_results():
    host = poptorch.CPU(lambda pair, scale: {"sum": (pair[0] + pair[1]) * scale}, "nested")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return host([x, x + 1], scale=2)["sum"]

    assert poptorch.inferenceModel(Model(), options())(torch.ones(1)).tolist() == [6.0]


def test_layer_uses_the_weights_of_the_host():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.host = poptorch.CPU(self.layer, "linear")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.host(x)

    model, x = Model(), torch.ones(1, 2)
    inference = poptorch.inferenceModel(model, options())
    assert torch.equal(inference(x), model.layer(x))
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(inference(x), model.layer(x))


@pytest.mark.parametrize("kind", [tuple, list])
def test_layer_with_several_outputs(kind):
    host = poptorch.CPU(lambda x: kind((x, x.argmax())), "several")

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            found = host(x)
            assert type(found) is kind
            return found[0] + found[1]

    assert poptorch.inferenceModel(Model(), options())(torch.tensor([1.0, 5.0])).tolist() == [2.0, 6.0]


def test_call_outside_a_model_is_differentiable():
    x = torch.ones(2, requires_grad=True)
    poptorch.CPU(lambda y: (y * 3).sum(), "sum")(x).backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_input_with_gradient_raises_error_on_the_device():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.host = poptorch.CPU(lambda x: x * 2, "double")
            self.after_weight = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.host(x * self.weight) if self.after_weight else self.host(x) * self.weight
            return poptorch.identity_loss(y, "sum")

    with pytest.raises(poptorch.Error, match="'double': no gradient flows"):
        poptorch.trainingModel(Model(), options())(torch.ones(1))
    model = Model()
    model.after_weight = False
    training = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.25))
    assert training(torch.ones(1)) == 2.0
    assert model.weight.item() == 0.5


def test_execute_reads_inputs_and_writes_outputs():
    host = poptorch.CPU(lambda x: x + 1, "increment")
    poptorch.inferenceModel(_calling(host), options())(torch.zeros(1))
    host.registerPersistentData()
    place = host.outputs[0]
    host.inputs[0].fill_(5.0)
    host.execute()
    assert place.item() == 6.0


def _calling(host: poptorch.CPU) -> nn.Module:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return host(x)

    return Model()


def test_layer_without_tensor_outputs_raises_error():
    with pytest.raises(poptorch.Error, match="'none': the layer returned None, but no tensor"):
        poptorch.inferenceModel(_calling(poptorch.CPU(lambda x: None, "none")), options())(torch.zeros(1))


def test_layer_must_be_callable():
    with pytest.raises(ValueError, match="`layer_to_call` must be a function, not int"):
        poptorch.CPU(3, "three")


def test_copies_of_a_model_share_the_layer():
    model = Hosted()
    assert copy.deepcopy(model).host is model.host


def test_error_in_the_layer_restores_the_host_mode():
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such host")

    with pytest.raises(RuntimeError, match="no such host"):
        poptorch.inferenceModel(_calling(poptorch.CPU(fail, "fail")), options())(torch.zeros(1))
    assert not poptorch.isRunningOnIpu()
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float64


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


def test_printing_on_the_host_is_the_identity(capsys):
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
        (torch.arange(50), {"max_line_width": 0}, f"({', '.join(f'{number:2}' for number in range(50))})"),
        (torch.arange(3), {"summarise_threshold": 0, "edge_items": 1}, "(0, 1, 2)"),
        (torch.arange(2), {"separator": " ", "open_bracket": "[", "close_bracket": "]"}, "[0 1]"),
    ],
)
def test_print_format(tensor, settings, text):
    assert DEFAULT_FORMAT._replace(**settings).text(tensor) == text


def test_print_summary_has_the_edges_of_every_dimension():
    text = DEFAULT_FORMAT._replace(summarise_threshold=10, edge_items=1).text(torch.arange(16).reshape(4, 4))
    assert text == "(( 0, ...,  3),\n ...,\n (12, ..., 15))"


@pytest.mark.parametrize(
    "settings",
    [{"float_format": "hex"}, {"digits": -1}, {"edge_items": 1.5}, {"separator": 1}, {"max_line_width": "a"}],
)
def test_invalid_print_formats_raise_error(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        poptorch.ipu_print_tensor(torch.ones(1), **settings)
