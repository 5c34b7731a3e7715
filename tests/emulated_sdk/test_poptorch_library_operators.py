"""The emulated SDK's own implementations of the operators of Graphcore's public repositories."""

from __future__ import annotations

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options, wrapped


def call(name, *inputs, like=None, domain="ai.graphcore", **attributes):
    example = inputs[0] if like is None else like
    return poptorch.custom_op(list(inputs), name, domain, 1, [example], attributes)[0]


class Both(nn.Module):
    """The sum of a function of two weights, with a gradient of each element of the result."""

    def __init__(self, function, a, b, scale):
        super().__init__()
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.function = function
        self.register_buffer("scale", scale)

    def forward(self):
        return poptorch.identity_loss(self.function(self.a, self.b) * self.scale, "sum")


def gradients(function, a, b, scale, opts=None):
    model = Both(function, a, b, scale)
    wrapped(model, opts, lr=1.0)()
    return a - model.a.detach(), b - model.b.detach()


def test_autograd_proxy_returns_the_first_and_differentiates_the_second():
    opts = options()
    opts._Popart.setPatterns({"AutogradProxyOpPattern": True})
    a, b = torch.tensor([0.6]), torch.tensor([0.7])
    assert on_device(lambda a, b: call("AutogradProxy", a, b), a, b, opts=opts).item() == a.item()
    found = gradients(lambda a, b: call("AutogradProxy", a.round(), 3 * b), a, b, torch.tensor([5.0]), opts)
    assert [each.item() for each in found] == [0.0, pytest.approx(15.0)]


def test_a_pattern_that_nothing_registers_is_an_error():
    opts = options()
    opts._Popart.setPatterns({"NoSuchPattern": True})
    with pytest.raises(poptorch.Error, match="Unknown pattern 'NoSuchPattern'"):
        on_device(lambda x: x + 1, torch.ones(1), opts=opts)


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
    """Return the numbers of a format, subnormal and normal, of both signs."""
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
    x = torch.full((4000,), -1.35)
    results = [
        on_device(lambda x: quantised(x, rounding="stochastic"), x, opts=options().randomSeed(3)) for _ in range(2)
    ]
    assert {*results[0].tolist()} == {-1.5, -1.0}
    assert results[0].mean().item() == pytest.approx(-1.35, abs=0.02)
    assert torch.equal(*results)


@pytest.mark.parametrize(("bwd", "expected"), [("stop", 0.0), ("ste", 1.35), ("quantise", 1.5)])
def test_the_gradient_of_a_quantisation(bwd, expected):
    a, b = torch.tensor([0.3]), torch.tensor([0.0])
    scale = torch.tensor([1.35])
    found, _ = gradients(lambda a, b: quantised(a, fwd=False, bwd=bwd) + b, a, b, scale)
    assert found.item() == pytest.approx(expected)
    assert on_device(lambda x: quantised(x, fwd=False, bwd=bwd), a).item() == a.item()


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


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("RemapCE", {"grain_size": 8}),
        ("RemapCE", {"fwd_grain_size": 8, "bwd_grain_size": 8, "fwd_after_matmul": 0, "debug_str": "a"}),
        ("CopyTensor", {}),
    ],
)
def test_a_new_layout_changes_no_value_and_no_gradient(name, attributes):
    a, b = torch.tensor([0.5, 2.0]), torch.zeros(2)
    scale = torch.tensor([3.0, 4.0])
    assert torch.equal(on_device(lambda x: call(name, x, **attributes), a), a)
    assert torch.equal(gradients(lambda a, b: call(name, a, **attributes) + b, a, b, scale)[0], scale)


def test_the_leaky_relu_of_the_tutorial():
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


def test_a_moving_average_of_what_is_no_parameter_is_an_error():
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
    return on_device(
        lambda *given: poptorch.custom_op([*given], "Nms", "ai.graphcore", 1, like, attributes), scores, boxes
    )


def test_overlapping_boxes_of_a_class_are_suppressed():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 10, 4]]).repeat(2, 1, 1)
    scores = torch.tensor([[0.9, 0.0], [0.8, 0.7], [0.1, 0.6], [0.5, 0.0]]).repeat(2, 1, 1)
    scores[1, 1:] = 0
    indices, kept, places, classes, lengths = detected(scores, boxes, 5, threshold=0.5, scoreThreshold=0.2)
    none = torch.iinfo(torch.int32).max
    assert indices.tolist() == [[0, 1, 2, 3, -1], [0, -1, -1, -1, -1]]
    assert classes.tolist() == [[0, 1, 1, 0, none], [0, *[none] * 4]]
    assert lengths.tolist() == [4, 1]
    torch.testing.assert_close(kept, torch.tensor([[0.9, 0.7, 0.6, 0.5, 0.0], [0.9, 0.0, 0.0, 0.0, 0.0]]))
    assert torch.equal(places[0, :4], boxes[0, [0, 1, 2, 3]])
    assert not places[1, 1:].any()
    soft = detected(scores[:1], boxes[:1], 2, scoreThreshold=0.2, sigma=0.5)
    assert soft[0].tolist() == [[0, 1]]  # of class 1, as box 1 of class 0 overlaps with the first
    assert detected(scores[:1], boxes[:1], 4, scoreThreshold=0.2, sigma=0.5)[1][0, 3].item() == pytest.approx(
        0.5 * torch.exp(torch.tensor(-(0.4**2) / 0.5)).item()
    )
