"""Ops that run on the host: `CPU` and `ipu_print_tensor`."""

from __future__ import annotations

import copy

import poptorch
import pytest
import torch
from poptorch.ops.host import PrintFormat
from torch import nn

from tests.support.poptorch_models import Apply, Line, on_device, options, wrapped

DEFAULT_FORMAT = PrintFormat(1000, 3, 80, 4, "auto", ", ", "(", ")")
ONE = torch.ones(1)


class Hosted(nn.Module):
    """Calls one of its methods on the host, between two operations on the device."""

    def __init__(self):
        super().__init__()
        self.host = poptorch.CPU(self.on_host, "host")
        self.calls, self.seen = 0, None

    def on_host(self, x, scale=1.0):
        self.calls += 1
        self.seen = (x.dtype, poptorch.isRunningOnIpu(), x.cpu().numpy().tolist())
        return x.cpu() * scale

    def forward(self, x):
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


def test_layer_gets_the_dtypes_of_the_api_also_from_models_that_share_it():
    model = Hosted()
    poptorch.inferenceModel(model, options())(torch.tensor([1, 2]))
    assert model.seen[0] == torch.int32
    half, full = (poptorch.inferenceModel(model, options()) for _ in range(2))
    for _ in range(2):
        output = half(ONE.half())
        assert (model.seen[0], output.dtype, output.item()) == (torch.half, torch.half, 12.0)
        full(ONE)
        assert model.seen[0] == torch.float32


@pytest.mark.parametrize("kind", [tuple, list])
def test_nested_arguments_and_results(kind):
    host = poptorch.CPU(lambda pair, scale: {"found": kind(((pair[0] + pair[1]) * scale, pair[0].argmax()))}, "nested")

    def forward(x):
        found = host([x, x + 1], scale=2)["found"]
        assert type(found) is kind
        return found[0] + found[1]

    assert on_device(forward, torch.tensor([1.0, 5.0])).tolist() == [7.0, 23.0]


def test_layer_uses_the_weights_of_the_host():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    model = Apply(lambda self, x: self.host(x), layer=layer, host=poptorch.CPU(layer, "linear"))
    inference = poptorch.inferenceModel(model, options())
    for _ in range(2):
        assert torch.equal(inference(x), layer(x))
        layer.weight.data.zero_()


def test_call_outside_a_model_is_differentiable():
    x = torch.ones(2, requires_grad=True)
    poptorch.CPU(lambda y: (y * 3).sum(), "sum")(x).backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_input_with_gradient_raises_error_on_the_device():
    host = poptorch.CPU(lambda x: x * 2, "double")

    def training_of(product):
        def forward(self, x):
            return poptorch.identity_loss(product(x, self.weight), "sum")

        return wrapped(Apply(forward, weight=nn.Parameter(ONE.clone())), lr=0.25)

    with pytest.raises(poptorch.Error, match="'double': no gradient flows"):
        training_of(lambda x, weight: host(x * weight))(ONE)
    training = training_of(lambda x, weight: host(x) * weight)
    assert training(ONE) == 2.0
    assert training.model.weight.item() == 0.5


def test_execute_reads_inputs_and_writes_outputs():
    host = poptorch.CPU(lambda x: x + 1, "increment")
    on_device(lambda x: host(x), ONE)
    host.registerPersistentData()
    place = host.outputs[0]
    host.inputs[0].fill_(5.0)
    host.execute()
    assert place.item() == 6.0


def test_a_layer_is_callable_and_returns_tensors():
    with pytest.raises(poptorch.Error, match="'none': the layer returned None, but no tensor"):
        on_device(poptorch.CPU(lambda x: None, "none"), ONE)
    with pytest.raises(ValueError, match="`layer_to_call` must be a function, not int"):
        poptorch.CPU(3, "three")


def test_copies_of_a_model_share_the_layer():
    model = Hosted()
    assert copy.deepcopy(model).host is model.host


def test_error_in_the_layer_restores_the_host_mode():
    def fail(x):
        raise RuntimeError("no such host")

    with pytest.raises(RuntimeError, match="no such host"):
        on_device(poptorch.CPU(fail, "fail"), ONE)
    assert not poptorch.isRunningOnIpu()
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float64


class Printing(Line):
    def __init__(self, print_gradient=True):
        super().__init__()
        self.print_gradient = print_gradient

    def forward(self, x):
        return super().forward(poptorch.ipu_print_tensor(x * self.weight, "x", self.print_gradient))


@pytest.mark.parametrize(("print_gradient", "second"), [(True, "x_gradient: (0.5000, 0.5000)\n"), (False, "")])
def test_every_run_prints_value_and_gradient_but_compilation_prints_nothing(capsys, print_gradient, second):
    training = poptorch.trainingModel(Printing(print_gradient), options())
    training.compile(torch.ones(2))
    assert capsys.readouterr().err == ""
    training(torch.ones(2))
    assert capsys.readouterr().err == "x: (1.0000, 1.0000)\n" + second


def test_every_replica_and_iteration_prints(capsys):
    poptorch.inferenceModel(Printing(), options(replicas=2, iterations=2))(torch.arange(4.0))
    assert sorted(capsys.readouterr().err.splitlines()) == [f"x: ({value}.0000)" for value in range(4)]


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
        (
            torch.arange(16).reshape(4, 4),
            {"summarise_threshold": 10, "edge_items": 1},
            "(( 0, ...,  3),\n ...,\n (12, ..., 15))",
        ),
    ],
)
def test_print_format(tensor, settings, text):
    assert DEFAULT_FORMAT._replace(**settings).text(tensor) == text


@pytest.mark.parametrize(
    "settings",
    [{"float_format": "hex"}, {"digits": -1}, {"edge_items": 1.5}, {"separator": 1}, {"max_line_width": "a"}],
)
def test_invalid_print_formats_raise_error(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        poptorch.ipu_print_tensor(torch.ones(1), **settings)
