"""Half and mixed precision: dtypes at the API, rounding, convergence of training."""

from __future__ import annotations

import copy

import poptorch
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.poptorch_models import Line, batch, options, seeded, trained, wrapped

HALF = torch.half


class Function(nn.Module):
    """Calls a function with its input and a parameter."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.function(x, self.weight)


def on_device(function, x=None, is_half_model=True, opts=None):
    model = Function(function)
    model = model.half() if is_half_model else model
    return poptorch.inferenceModel(model, opts or options())(torch.ones(2, 4, dtype=HALF) if x is None else x)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, w: x * w, HALF),
        (lambda x, w: x * 2.0 + 1, HALF),
        (lambda x, w: x + w.float(), torch.float32),
        (lambda x, w: x + torch.ones(4), torch.float32),
        (lambda x, w: x + torch.ones(4, dtype=HALF), HALF),
        (lambda x, w: torch.zeros_like(x), HALF),
        (lambda x, w: x.softmax(-1), HALF),
        (lambda x, w: F.softmax(x, -1, dtype=torch.float32), torch.float32),
        (lambda x, w: F.log_softmax(x, -1), HALF),
        (lambda x, w: F.layer_norm(x, (4,), w, w), HALF),
        (lambda x, w: F.nll_loss(x, torch.tensor([0, 1])), HALF),
        (lambda x, w: F.cross_entropy(x, torch.tensor([0, 1])), HALF),
        (lambda x, w: torch.cat([x, x]), HALF),
        (lambda x, w: torch.where(x > 0, x, x), HALF),
        (lambda x, w: x.argmax(-1), torch.int32),
        (lambda x, w: x > 0, torch.bool),
        (lambda x, w: x.to(torch.bfloat16), torch.float32),
        (lambda x, w: x.double(), torch.float32),
        (lambda x, w: F.linear(weight=w[None].float(), input=x), HALF),
    ],
)
def test_half_with_half_is_half_and_half_with_float_is_float(function, dtype):
    assert on_device(function).dtype == dtype


def test_a_product_of_half_and_float_matrices_is_float():
    assert on_device(lambda x, w: x @ torch.ones(4, 4)).dtype == torch.float32
    assert on_device(lambda x, w: x * w, is_half_model=False).dtype == torch.float32
    assert on_device(lambda x, w: x + x, is_half_model=False).dtype == HALF


LAYERS = [
    (nn.Linear(4, 3), (2, 4)),
    (nn.Linear(4, 3), (4,)),
    (nn.Conv1d(4, 5, 2), (1, 4, 4)),
    (nn.Conv2d(3, 4, 3), (1, 3, 5, 5)),
    (nn.ConvTranspose2d(3, 4, 3), (1, 3, 5, 5)),
    (nn.GroupNorm(2, 4), (2, 4, 3)),
    (nn.LayerNorm(4), (2, 4)),
    (nn.BatchNorm1d(4), (3, 4)),
    (nn.InstanceNorm2d(4, affine=True), (3, 4, 2, 2)),
    (nn.PReLU(), (2, 3)),
    (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8)),
]


@pytest.mark.parametrize(("weights", "inputs"), [(torch.float32, HALF), (HALF, torch.float32), (HALF, HALF)])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda value: type(value).__name__)
def test_the_weights_of_a_layer_are_cast_to_the_dtype_of_its_input(layer, shape, weights, inputs):
    layer, x = copy.deepcopy(layer), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = copy.deepcopy(layer)(x)
    found = poptorch.inferenceModel(layer.to(weights), options())(x.to(inputs))
    assert (found.dtype, found.shape) == (inputs, expected.shape)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)


def test_an_operator_rounds_operands_and_result_but_adds_in_float():
    layer, x = nn.Linear(300, 5), torch.randn(4, 300).half()
    expected = F.linear(x.float(), layer.weight.half().float(), layer.bias.half().float()).half()
    assert torch.equal(poptorch.inferenceModel(layer, options())(x), expected)


def test_a_layer_with_an_integer_input_is_an_error_as_in_torch():
    with pytest.raises(RuntimeError):
        poptorch.inferenceModel(nn.Linear(4, 3), options())(torch.full((2, 4), 3))


def test_half_overflows_in_the_middle_of_a_forward():
    assert on_device(lambda x, w: (x * 300 * 300) / 300).isinf().all()
    assert torch.equal(on_device(lambda x, w: x.type_as(w) + 1e-4), torch.ones(2, 4, dtype=HALF))


def test_in_place_operators_change_half_tensors():
    def program(x, w):
        y = x.clone().unsqueeze(0)
        return y.add_(1.0).mul_(torch.full((4,), 0.5)).squeeze_(0)

    assert torch.equal(on_device(program), torch.ones(2, 4, dtype=HALF))


def test_gradients_of_float_weights_of_a_half_program_are_float_and_train():
    model = Function(lambda x, w: poptorch.identity_loss(model.layer(x), "sum"))
    model.layer = nn.Linear(4, 3)
    opts = options()
    opts.anchorTensor("gradient", "Gradient___layer.weight")
    opts.anchorTensor("out", "layer/Linear:0")
    before = model.layer.weight.detach().clone()
    training = wrapped(model, opts, lr=1e-5)
    assert training(torch.ones(2, 4, dtype=HALF)).dtype == HALF
    assert training.getAnchoredTensor("gradient").dtype == torch.float32
    assert training.getAnchoredTensor("out").dtype == HALF
    torch.testing.assert_close(model.layer.weight.detach(), before - 2e-5, atol=1e-7, rtol=0)


def rounded_stochastically(function, x):
    opts = options().randomSeed(3)
    opts.Precision.enableStochasticRounding(True)
    return on_device(function, x, is_half_model=False, opts=opts)


def test_stochastic_rounding_rounds_every_result():
    ones = torch.ones(20000, dtype=HALF)
    found = [rounded_stochastically(lambda x, w: x * 1.0001, ones) for _ in range(2)]
    assert set(found[0].float().unique().tolist()) == {1.0, 1.0009765625}
    assert found[0].float().mean().item() == pytest.approx(1.0001, abs=2e-5)
    assert torch.equal(*found)
    assert rounded_stochastically(lambda x, w: torch.log1p(x), -2 * ones).isnan().all()


def test_stochastic_rounding_is_independent_of_the_numbers_of_the_model():
    def draw_and_round(x, w):
        return torch.randint(0, 2**13, x.shape), x * (1 + 2**-12)

    drawn, rounded = rounded_stochastically(draw_and_round, torch.ones(20000, dtype=HALF))
    rises = rounded > 1
    assert 0.2 < rises.float().mean() < 0.3
    assert drawn[rises].float().mean().item() == pytest.approx(drawn[~rises].float().mean().item(), rel=0.05)


def test_a_layer_on_the_host_rounds_to_nearest():
    on_host = poptorch.CPU(lambda x: (x.float() * (1 + 2**-12)).half(), "layer")
    assert (rounded_stochastically(lambda x, w: on_host(x), torch.ones(1000, dtype=HALF)) == 1).all()


@pytest.mark.parametrize("accumulation", [127, 128])
def test_a_mean_over_many_terms_does_not_underflow(accumulation):
    model = Function(lambda x, w: poptorch.identity_loss((F.linear(x, w[None]).float() * 2e-4).sum(), "sum"))
    x = torch.full((accumulation, 4), 1e-2, dtype=HALF)  # the gradient is 2e-6; in half, 2e-6 / 127 is 0
    trained(model, x, opts=options(accumulation=accumulation), algorithm="AdamW", weight_decay=0.0)
    torch.testing.assert_close(model.weight.detach(), torch.full((4,), 0.9), atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_replicas_do_not_change_a_half_training(dtype):
    images, labels = batch(16)
    weights = []
    for replicas, accumulation in ((1, 4), (4, 1)):
        model = seeded().eval().to(dtype)
        trained(model, images.half(), labels, opts=options(replicas, accumulation), loss_scaling=64.0)
        weights.append(model.conv.weight.detach().float())
    torch.testing.assert_close(*weights, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("cast", [lambda x: x.half(), lambda x: x.to(HALF), lambda x: x.to(dtype=HALF)])
def test_a_cast_to_half_rounds(cast):
    x = torch.tensor([[1.0003, 1e-9, 70000.0, 0.5]])
    assert torch.equal(on_device(lambda x, w: cast(x), x, is_half_model=False), x.half())
    assert torch.equal(on_device(lambda x, w: cast(x).float(), x, is_half_model=False), x.half().float())


def test_every_forward_reads_the_same_dtype():
    def smallest(x, w):
        assert x.element_size() == 2
        return x + torch.finfo(x.dtype).min if x.dtype == HALF else x

    model = poptorch.inferenceModel(Function(smallest), options(iterations=2))
    for _ in range(2):
        assert torch.equal(model(torch.zeros(2, 4, dtype=HALF)), torch.full((2, 4), -65504, dtype=HALF))


def test_a_half_model_has_half_weights_and_float_optimizer_state():
    model = seeded().half()
    training = wrapped(model, options(2), "Adam", lr=0.01)
    images, labels = batch(4)
    logits, loss = training(images.half(), labels)
    assert (logits.dtype, loss.dtype) == (HALF, HALF)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {HALF, torch.int64}
    assert torch.isfinite(model.norm.running_var).all()
    assert {tensor.dtype for tensor in training._optimizer.state_dict()["ipu_state"].values()} == {torch.float32}


def test_half_weights_are_rounded_after_every_update():
    training = wrapped(Line().half(), lr=1e-4)
    for _ in range(5):
        training(torch.ones(2, dtype=HALF))
    # 1 - 1e-4 rounds to 1 in half, so no update changes the weight; in float32 five updates would.
    assert training.model.weight.item() == 1


def test_loss_scaling_does_not_change_half_models():
    x = torch.full((2,), 0.3, dtype=HALF)
    weights = [trained(Line().half(), x, loss_scaling=scaling).weight.item() for scaling in (1.0, 128.0)]
    assert weights[0] == weights[1]


def test_the_partials_type_has_no_effect():
    found = []
    for partials in (torch.float, HALF):
        opts = options()
        opts.Precision.setPartialsType(partials)
        found.append(poptorch.inferenceModel(seeded().half().eval(), opts)(batch(2)[0].half()))
    assert torch.equal(*found)


@pytest.mark.parametrize(("weights", "inputs"), [(HALF, HALF), (torch.float32, HALF), (torch.float32, torch.float32)])
def test_every_precision_converges(weights, inputs):
    images, labels = batch(20)
    images[torch.arange(20), labels % 3] += 1.0 + labels.view(-1, 1, 1) // 3
    model = seeded().to(weights)
    scaling = {"loss_scaling": 128.0, "velocity_scaling": 128.0, "use_combined_accum": True}
    training = wrapped(model, options(1, 2, 2), lr=0.2, momentum=0.9, **scaling)
    for _ in range(15):
        training(images.to(inputs), labels)
    model.eval()
    accuracy = (poptorch.inferenceModel(model, options())(images.to(inputs)).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.9
