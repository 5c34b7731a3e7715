"""`custom_op` on the device: Python implementations by name, and those of Graphcore's public repositories."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import poptorch
import pytest
import torch
from poptorch.custom_operators import registry
from poptorch.emulation import custom_op_emulation
from torch import nn

from tests.support import ROOT
from tests.support.poptorch_models import Apply, on_device, options, trained, wrapped
from tests.support.refused import rejects

PAGE = ROOT / "docs" / "reference" / "emulated-sdk.md"


@custom_op_emulation("Cube", domain="com.acme")
def cube(x, bias, alpha=1.0, name=""):
    values = x.tolist()  # an implementation may read values, and is no operator of the program
    return torch.triu(x**3).mul(alpha) + bias, torch.tensor([len(values)])


@custom_op_emulation("RoundTwice", domain="com.acme", version=2)
def round_twice(x):
    return torch.round(x)


@round_twice.backward
def _round_twice_backward(inputs, outputs, gradients):
    assert torch.equal(outputs[0], inputs[0].round())
    return 2 * gradients[0]


def call_cube(x, bias, **attributes):
    examples = [x, torch.zeros(1, dtype=torch.int32)]
    return poptorch.custom_op([x, bias], "Cube", "com.acme", 1, examples, attributes)


def test_an_implementation_computes_what_custom_op_returns_on_the_device_also_in_half(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    x, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 2)
    y, count = on_device(lambda x, bias: call_cube(x, bias, alpha=2.0, name="a"), x, bias)
    assert torch.equal(y, torch.triu(x**3) * 2 + 1)
    assert (count.tolist(), count.dtype) == ([2], torch.int32)
    assert torch.equal(on_device(lambda x, bias: call_cube(x, bias)[0], x, bias), torch.triu(x**3) + 1)
    x = torch.full((2, 2), 0.1, dtype=torch.half)
    y = on_device(lambda x: call_cube(x, torch.zeros_like(x))[0], x)
    assert (y.dtype, y[0, 1]) == (torch.half, (x[0, 1].float() ** 3).half())


def weighted(function):
    weight = nn.Parameter(torch.full((2, 2), 1.25))
    return Apply(lambda model, x: poptorch.identity_loss(function(model.weight * x), "sum"), weight=weight)


@pytest.mark.parametrize("is_plain", [True, False])
def test_gradients_are_those_of_autograd_or_of_a_backward_function(is_plain):
    x = torch.full((2, 2), 2.0)

    def weights_after(function):
        model = weighted(function if is_plain else lambda x: function(x).to(torch.float64))
        return trained(model, x, lr=1.0).weight.detach()

    by_autograd = weights_after(lambda x: call_cube(x, torch.zeros(2, 2))[0])
    assert torch.equal(by_autograd, 1.25 - torch.triu(torch.full((2, 2), 3 * 2.5**2 * 2)))
    by_function = weights_after(lambda x: poptorch.custom_op([x], "RoundTwice", "com.acme", 2, [x])[0])
    assert torch.equal(by_function, torch.full((2, 2), 1.25 - 2 * 2))


def custom(name, x):
    return poptorch.custom_op([x], name, "com.acme", 1, [x])[0]


def test_an_output_that_is_the_input_is_a_copy_and_a_function_must_take_the_attributes():
    custom_op_emulation("Same", domain="com.acme")(lambda x: x)
    changed = on_device(lambda x: (custom("Same", x).add_(1), x), torch.ones(1))
    assert [each.item() for each in changed] == [2.0, 1.0]
    with pytest.raises(poptorch.Error, match=r"cube, which emulates com.acme.Cube:1: .*'beta'.*2 inputs and .*: beta"):
        on_device(lambda x: call_cube(x, x, beta=1)[0], torch.ones(1))


@pytest.mark.parametrize("returned", [torch.ones(2), torch.ones(3, dtype=torch.half), (torch.ones(3), torch.ones(1))])
def test_other_outputs_than_those_of_the_examples_are_an_error(returned):
    custom_op_emulation("Wrong", domain="com.acme")(lambda x: returned)
    with pytest.raises(poptorch.Error, match=r"com.acme.Wrong:1: its emulation returned .*example_.* float32\[3\]"):
        on_device(lambda x: custom("Wrong", x), torch.ones(3))


def test_what_is_no_tensor_or_lacks_gradients_or_an_implementation_is_an_error():
    custom_op_emulation("List", domain="com.acme")(lambda x: 1.0)
    with pytest.raises(poptorch.Error, match="List:1: the outputs must be tensors, not float"):
        on_device(lambda x: custom("List", x), torch.ones(3))
    lacking = custom_op_emulation("Lacking", domain="com.acme")(lambda x: x * 1)
    lacking.backward(lambda inputs, outputs, gradients: ())
    with pytest.raises(poptorch.Error, match="Lacking:1: backward returned 0 gradients for 1 inputs"):
        trained(weighted(lambda x: custom("Lacking", x)), torch.ones(2, 2))
    message = (
        r"com.acme.Missing:3 is C\+\+ for the IPU.*@custom_op_emulation\('Missing', domain='com.acme', version=3\) of "
        r"poptorch.emulation, in a module that EMULATED_POD_CUSTOM_OPS names"
    )
    with pytest.raises(poptorch.Error, match=message):
        on_device(lambda x: poptorch.custom_op([x], "Missing", "com.acme", 3, [x])[0], torch.ones(1))


def test_a_named_module_and_an_entry_point_register_their_implementations(monkeypatch, tmp_path):
    (tmp_path / "other_operators.py").write_text(
        "from poptorch.emulation import custom_op_emulation\n"
        "@custom_op_emulation('Named', domain='com.acme', version=4)\n"
        "def named(x): return x + 4\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json, other_operators")

    def call(x):
        return torch.ops.poptorch.custom_operation([x], "Named", "com.acme", 4, 1, [x], "")[0]

    assert on_device(call, torch.ones(1)).item() == 5.0
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "no_such_module")
    with pytest.raises(poptorch.Error, match="EMULATED_POD_CUSTOM_OPS=no_such_module cannot be imported: .*PYTHONPATH"):
        on_device(call, torch.ones(1))
    monkeypatch.delenv("EMULATED_POD_CUSTOM_OPS")

    def load():
        custom_op_emulation("Entered", domain="com.acme")(lambda x: x + 7)

    entry = SimpleNamespace(name="own", load=load)
    found = SimpleNamespace(select=lambda group: [entry] * (group == registry.ENTRY_POINTS))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: found)
    registry._entry_points.cache_clear()
    try:
        assert on_device(lambda x: custom("Entered", x), torch.ones(1)).item() == 8.0
    finally:
        registry._entry_points.cache_clear()


def test_an_input_of_the_host_module_is_the_tensor_of_the_device_and_a_constant_is_rejected(monkeypatch):
    layer, constant = nn.Linear(2, 2), torch.zeros(2, 2)
    before = layer.weight.detach().clone()
    trained(
        Apply(lambda model, x: poptorch.identity_loss(call_cube(layer.weight, x)[0], "sum"), layer=layer),
        constant,
        lr=1.0,
    )
    assert torch.allclose(layer.weight, before - torch.triu(3 * before**2))
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    with pytest.raises(poptorch.Error, match="Expected an IPU tensor"):
        on_device(lambda x: call_cube(x, constant)[0], torch.ones(2, 2))


@pytest.mark.parametrize("load", [ctypes.cdll.LoadLibrary, torch.ops.load_library])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_library_that_cannot_be_loaded_is_one_warning(monkeypatch, caplog, tmp_path, load, is_empty):
    path = tmp_path / f"custom_ops_{load.__name__}_{is_empty}.so"
    if is_empty:
        path.touch()
    rejects(OSError, path.name, load, str(path))
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json")
    for _ in range(2):
        library = load(str(path))
    assert [record.message.split(": ")[0] for record in caplog.records] == [f"{path} was not loaded"]
    rejects(AttributeError, "has no 'add' here", getattr, library, "add")


@pytest.mark.parametrize("name", ["libraypod_absent.so", "libabsent.so.1", "/usr/lib/absent.so", "./absent.txt"])
def test_loads_of_other_libraries_are_unchanged(monkeypatch, name):
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "json")
    assert ctypes.cdll.LoadLibrary(None).getpid
    rejects(OSError, "absent", ctypes.cdll.LoadLibrary, name)


def test_the_documented_program_trains(monkeypatch, tmp_path, capsys):
    section = PAGE.read_text().partition("\n## Custom operators")[2].partition("\n## ")[0]
    operators, program = re.findall("```python\n(.*?)```", section, re.S)
    (tmp_path / "own_operators.py").write_text(operators)
    (tmp_path / "leaky.py").write_text(program)
    assert "EMULATED_POD_CUSTOM_OPS=own_operators raypod launch --device emulated python leaky.py" in section
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "own_operators")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_operators", raising=False)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("leaky.py")
    first, last = map(float, re.findall(r"loss (.+) -> (.+)\n", capsys.readouterr().out)[0])
    assert last < first / 2


def test_a_library_is_tolerated_before_poptorch_is_imported(processes, tmp_path):
    program = "import ctypes, sys; ctypes.cdll.LoadLibrary('./own.so'); print('poptorch' in sys.modules)"
    paths = [ROOT / "raypod" / "host" / "startup", ROOT / "raypod" / "emulated_sdk"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "EMULATED_POD_CUSTOM_OPS": "json"}
    command, outputs = [sys.executable, "-c", program], {"capture_output": True, "text": True}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, check=True, **outputs)
    assert ended.stdout == "True\n"
    assert "./own.so was not loaded" in ended.stderr


def call(name, *inputs, like=None, domain="ai.graphcore", **attributes):
    example = inputs[0] if like is None else like
    return poptorch.custom_op(list(inputs), name, domain, 1, [example], attributes)[0]


def gradients(function, a, b, scale, opts=None):
    """Return the gradients of two weights, from a gradient of each element of a function of them."""

    def forward(model):
        return poptorch.identity_loss(function(model.a, model.b) * model.scale, "sum")

    model = Apply(forward, a=nn.Parameter(a.clone()), b=nn.Parameter(b.clone()))
    model.register_buffer("scale", scale)
    wrapped(model, opts, lr=1.0)()
    return a - model.a.detach(), b - model.b.detach()


@pytest.mark.parametrize(("name", "order"), [("L1Distance", 1), ("L2Distance", 2)])
def test_distances_and_their_gradients(name, order):
    a = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    b = torch.tensor([[1.0, 3.0, 2.0], [1.0, 1.0, 1.0], [-1.0, 0.5, 4.0]])

    def distances(a, b):
        return call(name, a, b, like=torch.zeros(2, 3, dtype=a.dtype), root_path="/nowhere")

    expected = (a[:, None] - b[None]).norm(p=order, dim=-1)
    torch.testing.assert_close(on_device(distances, a, b), expected)
    half = on_device(distances, a.half(), b.half())
    torch.testing.assert_close(half, expected.half())
    scale = torch.arange(6.0).view(2, 3)
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    ((x[:, None] - y[None]).norm(p=order, dim=-1) * scale).sum().backward()
    for found, gradient in zip(gradients(distances, a, b, scale), (x.grad, y.grad)):
        torch.testing.assert_close(found, gradient)


def quantised(x, exponent_bits=2, mantissa_bits=1, rounding="nearest", fwd=True, bwd="ste"):
    bits = {"exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
    return call("SimulatedQuant", x, **bits, rounding=rounding, fwd=fwd, bwd=bwd, root_path="/nowhere")


def values_of_format(exponent_bits, mantissa_bits):
    bias, steps = 2 ** (exponent_bits - 1), 2**mantissa_bits
    positive = {step / steps * 2.0 ** (1 - bias) for step in range(steps)}
    positive |= {(1 + step / steps) * 2.0 ** (e - bias) for e in range(1, 2**exponent_bits) for step in range(steps)}
    return sorted(value for each in positive for value in (each, -each))


@pytest.mark.parametrize(("exponent_bits", "mantissa_bits"), [(2, 1), (3, 0), (4, 3)])
def test_a_value_is_rounded_to_the_nearest_one_of_the_format(exponent_bits, mantissa_bits):
    numbers = torch.tensor(values_of_format(exponent_bits, mantissa_bits))
    x = torch.cat([numbers, torch.linspace(-1.2 * numbers.max(), 1.2 * numbers.max(), 999).half().float()])
    found = on_device(lambda x: quantised(x, exponent_bits, mantissa_bits), x)
    distance = (x[:, None] - numbers).abs().min(1).values
    torch.testing.assert_close((x - found).abs(), distance, atol=2e-3, rtol=0)
    assert {*found.tolist()} == {*numbers.tolist()}


def test_stochastic_rounding_keeps_the_mean_and_is_repeatable():
    x, opts = torch.full((4000,), -1.35), options().randomSeed(3)
    results = [on_device(lambda x: quantised(x, rounding="stochastic"), x, opts=opts.clone()) for _ in range(2)]
    assert {*results[0].tolist()} == {-1.5, -1.0}
    assert results[0].mean().item() == pytest.approx(-1.35, abs=0.02)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_products_with_a_static_sparse_matrix(dtype):
    sparse = torch.zeros(4, 6, dtype=dtype)
    sparse[0:2, 2:4] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sparse[2:4, 4:6] = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    values = [float(value) for value in range(1, 9)]
    blocks = {"n_rows": 4, "n_cols": 6, "block_size": 2, "rows": [0, 2], "cols": [2, 4], "values": values}
    right, left = torch.arange(18.0).view(6, 3).to(dtype), torch.arange(8.0).view(2, 4).to(dtype)

    def product(mode, like):
        return lambda x: call("StaticSparseMatmul", x, like=like, mode=mode, **blocks)

    found = on_device(product("sparse_dense", torch.zeros(4, 3, dtype=dtype)), right)
    assert torch.equal(found, (sparse.float() @ right.float()).to(dtype))
    found = on_device(product("dense_sparse", torch.zeros(2, 6, dtype=dtype)), left)
    assert torch.equal(found, (left.float() @ sparse.float()).to(dtype))


def test_the_gradient_of_a_quantisation():
    a, b = torch.tensor([0.3]), torch.tensor([0.0])
    for bwd, expected in (("stop", 0.0), ("ste", 1.35), ("quantise", 1.5)):
        identity = functools.partial(quantised, fwd=False, bwd=bwd)
        found, _ = gradients(lambda a, b: identity(a) + b, a, b, torch.tensor([1.35]))  # noqa: B023
        assert found.item() == pytest.approx(expected)
        assert on_device(identity, a).item() == a.item()


RENAMED = {"fwd_grain_size": 8, "bwd_grain_size": 8, "fwd_after_matmul": 0, "debug_str": "a"}


@pytest.mark.parametrize(
    ("name", "attributes"), [("RemapCE", {"grain_size": 8}), ("RemapCE", RENAMED), ("CopyTensor", {})]
)
def test_a_new_layout_changes_no_value_and_no_gradient(name, attributes):
    a, scale = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 4.0])
    assert torch.equal(on_device(lambda x: call(name, x, **attributes), a), a)
    found, _ = gradients(lambda a, b: call(name, a, **attributes) + b, a, torch.zeros(2), scale)
    assert torch.equal(found, scale)


def test_autograd_proxy_differentiates_the_second_and_the_leaky_relu_is_that_of_the_tutorial():
    opts, unknown = options(), options()
    opts._Popart.setPatterns({"AutogradProxyOpPattern": True})
    a, b = torch.tensor([0.6]), torch.tensor([0.7])
    assert on_device(lambda a, b: call("AutogradProxy", a, b), a, b, opts=opts).item() == a.item()
    found = gradients(lambda a, b: call("AutogradProxy", a.round(), 3 * b), a, b, torch.tensor([5.0]), opts)
    assert [each.item() for each in found] == [0.0, pytest.approx(15.0)]
    unknown._Popart.setPatterns({"NoSuchPattern": True})
    rejects(poptorch.Error, "Unknown pattern 'NoSuchPattern'", on_device, lambda x: x + 1, torch.ones(1), opts=unknown)
    x = torch.tensor([-2.0, 0.0, 3.0])
    for attributes, alpha in (({}, 0.01), ({"alpha": 0.5}, 0.5)):
        found = on_device(lambda x: call("LeakyRelu", x, domain="custom.ops", **attributes), x)  # noqa: B023
        torch.testing.assert_close(found, torch.nn.functional.leaky_relu(x, alpha))


def averaging(x, model, factor=0.9):
    factor = torch.tensor([factor], device="ipu") if x.dim() else factor
    with torch.no_grad():
        example = [model.weight]
        poptorch.custom_op([model.weight, model.average, factor], "ExpMovAvg", "com.acme", 1, example, {})
    return poptorch.identity_loss(model.weight * x, "mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_a_moving_average_is_updated_once_per_weight_update_from_the_weight_before_it(dtype):
    weight, average = nn.Parameter(torch.ones(1, dtype=dtype)), nn.Parameter(torch.zeros(1, dtype=dtype), False)
    model = Apply(lambda model, x: averaging(x, model), weight=weight, average=average)
    training = wrapped(model, options(replicas=2, accumulation=2, iterations=2), lr=0.5)
    for _ in range(2):
        training(torch.ones(8, 1, dtype=dtype))
    expected = 0.0
    for each in (1.0, 0.5, 0.0, -0.5):
        expected = 0.9 * expected + 0.1 * each
    assert model.weight.item() == pytest.approx(-1.0)
    assert model.average.item() == pytest.approx(expected, rel=2e-3 if dtype == torch.half else 1e-6)
    x = torch.ones(1)
    with pytest.raises(poptorch.Error, match="its second input is the parameter that it updates"):
        on_device(lambda x: call("ExpMovAvg", x, x, x, domain="com.acme"), x)


@pytest.mark.parametrize(("reduction", "scale"), [("Sum", 1.0), ("Mean", 0.5), ("NoReduction", 1.0)])
def test_the_ctc_loss_of_popart_and_its_gradient(reduction, scale):
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 2, 4), torch.tensor([[1, 2, 2], [3, 1, 0]])
    lengths = torch.tensor([6, 5]), torch.tensor([3, 2])
    attributes = {"reduction": reduction, "blank": 0, "outDataType": "UNDEFINED", "enableReducedClassesInLabel": True}

    def losses(weight, zeros):
        log_probs = weight.log_softmax(2) + zeros
        inputs = [log_probs, *(each.to("ipu", torch.int32) for each in (targets, *lengths))]
        loss = torch.zeros(2) if reduction == "NoReduction" else torch.zeros(())
        return poptorch.custom_op(inputs, "Ctc", "ai.graphcore", 1, [loss, log_probs], attributes)

    found = on_device(losses, logits, torch.zeros(1))
    source = logits.clone().requires_grad_()
    each = torch.nn.functional.ctc_loss(source.log_softmax(2), targets, *lengths, reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), source)
    expected = {"Sum": each.sum(), "Mean": each.mean(), "NoReduction": each}[reduction]
    torch.testing.assert_close(found[0], expected.detach())
    torch.testing.assert_close(found[1], gradient)
    trained, _ = gradients(lambda weight, zeros: losses(weight, zeros)[0], logits, torch.zeros(1), torch.ones(1))
    torch.testing.assert_close(trained, scale * gradient)


def detected(scores, boxes, count, **attributes):
    integers = torch.zeros(len(scores), count, dtype=torch.int)
    like = [integers, torch.zeros(len(scores), count), torch.zeros(len(scores), count, 4), integers, integers[:, 0]]
    attributes = {"numDetections": count, "useGather": 1, **attributes}
    nms = lambda *given: poptorch.custom_op([*given], "Nms", "ai.graphcore", 1, like, attributes)  # noqa: E731
    return on_device(nms, scores, boxes)


def test_overlapping_boxes_of_a_class_are_suppressed():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 10, 4]]).repeat(2, 1, 1)
    scores = torch.tensor([[0.9, 0.0], [0.8, 0.7], [0.1, 0.6], [0.5, 0.0]]).repeat(2, 1, 1)
    scores[1, 1:] = 0
    indices, kept, places, classes, lengths = detected(scores, boxes, 5, threshold=0.5, scoreThreshold=0.2)
    none = torch.iinfo(torch.int32).max
    assert indices.tolist() == [[0, 1, 2, 3, -1], [0, -1, -1, -1, -1]]
    assert (classes.tolist(), lengths.tolist()) == ([[0, 1, 1, 0, none], [0, *[none] * 4]], [4, 1])
    torch.testing.assert_close(kept, torch.tensor([[0.9, 0.7, 0.6, 0.5, 0.0], [0.9, 0.0, 0.0, 0.0, 0.0]]))
    assert torch.equal(places[0, :4], boxes[0, [0, 1, 2, 3]])
    assert not places[1, 1:].any()
    soft = detected(scores[:1], boxes[:1], 2, scoreThreshold=0.2, sigma=0.5)
    assert soft[0].tolist() == [[0, 1]]  # of class 1, as box 1 of class 0 overlaps with the first
    fourth = detected(scores[:1], boxes[:1], 4, scoreThreshold=0.2, sigma=0.5)[1][0, 3].item()
    assert fourth == pytest.approx(0.5 * torch.exp(torch.tensor(-(0.4**2) / 0.5)).item())
