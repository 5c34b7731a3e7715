"""Half and mixed precision: dtypes at the API, rounding, convergence, and values that are stored in half."""

from __future__ import annotations

import copy

import poptorch
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.poptorch_models import Apply, Line, batch, options, seeded, trained, wrapped
from tests.support.refused import rejects

HALF = torch.half


def weighted(function):
    return Apply(lambda model, x: function(x, model.weight), weight=nn.Parameter(torch.ones(4)))


def on_device(function, x=None, is_half_model=True, opts=None):
    model = weighted(function).half() if is_half_model else weighted(function)
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


def test_operators_round_operands_and_results_but_add_in_float():
    layer, x = nn.Linear(300, 5), torch.randn(4, 300).half()
    expected = F.linear(x.float(), layer.weight.half().float(), layer.bias.half().float()).half()
    assert torch.equal(poptorch.inferenceModel(layer, options())(x), expected)
    with pytest.raises(RuntimeError):  # as in torch
        poptorch.inferenceModel(nn.Linear(4, 3), options())(torch.full((2, 4), 3))
    assert on_device(lambda x, w: (x * 300 * 300) / 300).isinf().all()
    ones = torch.ones(2, 4, dtype=HALF)
    assert torch.equal(on_device(lambda x, w: x.type_as(w) + 1e-4), ones)
    changed = lambda x, w: x.clone().unsqueeze(0).add_(1.0).mul_(torch.full((4,), 0.5)).squeeze_(0)  # noqa: E731
    assert torch.equal(on_device(changed), ones)


def test_gradients_of_float_weights_of_a_half_program_are_float_and_train():
    opts = options()
    opts.anchorTensor("gradient", "Gradient___layer.weight")
    opts.anchorTensor("out", "layer/Linear:0")
    model = Apply(lambda model, x: poptorch.identity_loss(model.layer(x), "sum"), layer=nn.Linear(4, 3))
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


def test_stochastic_rounding_rounds_every_result_independently_of_the_numbers_of_the_model():
    ones = torch.ones(20000, dtype=HALF)
    found = [rounded_stochastically(lambda x, w: x * 1.0001, ones) for _ in range(2)]
    assert set(found[0].float().unique().tolist()) == {1.0, 1.0009765625}
    assert found[0].float().mean().item() == pytest.approx(1.0001, abs=2e-5)
    assert torch.equal(*found)
    assert rounded_stochastically(lambda x, w: torch.log1p(x), -2 * ones).isnan().all()

    def draw_and_round(x, w):
        return torch.randint(0, 2**13, x.shape), x * (1 + 2**-12)

    ones = torch.ones(20000, dtype=HALF)
    drawn, rounded = rounded_stochastically(draw_and_round, ones)
    rises = rounded > 1
    assert 0.2 < rises.float().mean() < 0.3
    assert drawn[rises].float().mean().item() == pytest.approx(drawn[~rises].float().mean().item(), rel=0.05)
    on_host = poptorch.CPU(lambda x: (x.float() * (1 + 2**-12)).half(), "layer")
    assert (rounded_stochastically(lambda x, w: on_host(x), ones[:1000]) == 1).all()


@pytest.mark.parametrize("accumulation", [127, 128])
def test_a_mean_over_many_terms_does_not_underflow(accumulation):
    model = weighted(lambda x, w: poptorch.identity_loss((F.linear(x, w[None]).float() * 2e-4).sum(), "sum"))
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


def test_a_product_of_half_and_float_matrices_is_float_and_every_forward_reads_the_same_dtype():
    assert on_device(lambda x, w: x @ torch.ones(4, 4)).dtype == torch.float32
    assert on_device(lambda x, w: x * w, is_half_model=False).dtype == torch.float32
    assert on_device(lambda x, w: x + x, is_half_model=False).dtype == HALF

    def smallest(x, w):
        assert x.element_size() == 2
        return x + torch.finfo(x.dtype).min if x.dtype == HALF else x

    model = poptorch.inferenceModel(weighted(smallest), options(iterations=2))
    for _ in range(2):
        assert torch.equal(model(torch.zeros(2, 4, dtype=HALF)), torch.full((2, 4), -65504, dtype=HALF))


def test_a_half_model_has_float_optimizer_state_whatever_the_loss_scaling_and_partials_type():
    model = seeded().half()
    training = wrapped(model, options(2), "Adam", lr=0.01)
    images, labels = batch(4)
    logits, loss = training(images.half(), labels)
    assert (logits.dtype, loss.dtype) == (HALF, HALF)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {HALF, torch.int64}
    assert torch.isfinite(model.norm.running_var).all()
    assert {tensor.dtype for tensor in training._optimizer.state_dict()["ipu_state"].values()} == {torch.float32}
    x = torch.full((2,), 0.3, dtype=HALF)
    weights = [trained(Line().half(), x, loss_scaling=scaling).weight.item() for scaling in (1.0, 128.0)]
    assert weights[0] == weights[1]
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


IN_HALF = {"accum_type": torch.half}
# Near 1, half has steps of 2**-10: every addition loses what is smaller than half a step.
SMALL = [1.0, *[0.0004] * 7]
MEAN = poptorch.ReductionType.Mean


def accumulated(arguments, gradients, reduction=poptorch.ReductionType.Sum, strategy=None, replicas=1):
    model = Line()
    model.weight.data.fill_(0.0)
    opts = options(replicas, len(gradients) // replicas)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    if strategy is not None:
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return -trained(model, torch.tensor(gradients), opts=opts, lr=1.0, **arguments).weight.item()


def test_accumulators_in_half_are_added_in_float_over_the_replicas_and_may_overflow():
    assert accumulated({}, SMALL) == pytest.approx(1.0028), "by default gradients accumulate in float"
    for replicas in (1, 2):
        assert accumulated(IN_HALF, sorted(SMALL * replicas)[::-1], replicas=replicas) == replicas
    assert accumulated(IN_HALF, [1.0004]) == pytest.approx(1.0004), "a single micro-batch is not rounded"
    assert accumulated(IN_HALF, [1.0, 0.0004], replicas=2) == pytest.approx(1.0004)
    large, tiny = [40000.0] * 3, [1e-8] * 2
    for strategy in (None, *poptorch.MeanReductionStrategy):  # wrapping selects Running whatever the options say
        assert accumulated(IN_HALF, large, MEAN, strategy) == 40000
    assert accumulated({**IN_HALF, "use_combined_accum": True}, large, MEAN) == float("inf")
    found = accumulated(IN_HALF, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], MEAN, replicas=2)
    assert (found, accumulated(IN_HALF, tiny)) == (pytest.approx(63 / 6, rel=2e-3), 0)
    assert accumulated({**IN_HALF, "loss_scaling": 2.0**10}, tiny) == pytest.approx(2e-8, rel=2e-3)


@pytest.mark.parametrize(
    ("algorithm", "option", "quantity"),
    [
        ("SGD", "velocity_accum_type", "Accl1___weight"),
        ("Adam", "first_order_momentum_accum_type", "Accl1___weight"),
        ("AdamW", "second_order_momentum_accum_type", "Accl2___weight"),
        ("LAMB", "first_order_momentum_accum_type", "Accl1___weight"),
        ("RMSprop", "second_order_momentum_accum_type", "Accl1___weight"),
    ],
)
def test_optimizer_state_in_half_is_saved_and_restored_exactly(algorithm, option, quantity):
    values = {"loss_scaling": 8.0, option: torch.half, **({"momentum": 0.9} if algorithm in ("SGD", "RMSprop") else {})}
    (model, training), (twin, twin_training) = (
        (line, wrapped(line, None, algorithm, **values)) for line in (Line(), Line())
    )
    training(torch.full((1,), 0.3))
    saved, weight = training._optimizer.state_dict(), model.weight.item()
    dtypes = {name: tensor.dtype for name, tensor in saved["ipu_state"].items()}
    assert dtypes.pop(quantity) == torch.half
    assert set(dtypes.values()) <= {torch.float32}
    training(torch.full((1,), 0.7))
    twin.weight.data.fill_(weight)
    twin_training._optimizer.load_state_dict(saved)
    twin_training(torch.full((1,), 0.7))
    assert torch.equal(twin.weight, model.weight)


@pytest.mark.parametrize(
    ("arguments", "scaling"),
    [
        ({"loss_scaling": 4.0}, 4),
        ({"loss_scaling": 4.0, "use_combined_accum": True}, 1),
        ({"velocity_scaling": 16.0, "use_combined_accum": True}, 16),
    ],
)
def test_the_velocity_is_stored_with_its_scaling(arguments, scaling):
    training = wrapped(Line(), momentum=0.9, velocity_accum_type=torch.half, **arguments)
    training(torch.ones(1))
    name = "Accl___weight" if "use_combined_accum" in arguments else "Accl1___weight"
    assert training._optimizer.state_dict()["ipu_state"][name].item() == scaling


@pytest.mark.parametrize("is_automatic", [True, False])
def test_automatic_loss_scaling_makes_the_loss_scaling_variable(is_automatic):
    model, opts = Line(), options()
    opts.Training.setAutomaticLossScaling(is_automatic)
    training = wrapped(model, opts)
    training(torch.ones(1))
    training._optimizer.loss_scaling = 2.0
    if is_automatic:
        training.setOptimizer(training._optimizer)
        training(torch.ones(1))
        assert model.weight.item() == pytest.approx(0.8)
        return
    rejects(poptorch.Error, "'loss_scaling' was compiled as the constant", training.setOptimizer, training._optimizer)
    training = wrapped(Line(), options(1, 2))
    training(torch.ones(2))
    with pytest.raises(ValueError, match="the executable is already compiled, with Post"):
        training.setOptimizer(poptorch.optim.SGD(training.model.parameters(), lr=0.1, **IN_HALF))


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (1, 2), (2, 2)])
def test_automatic_loss_scaling_doubles_until_gradients_come_near_the_largest_half(replicas, accumulation):
    """Gradients of 1024 pass the bin edge, an eighth of 65504, with a factor of 8 or more."""
    opts = options(replicas, accumulation)
    opts.Training.setAutomaticLossScaling(True)
    model = Line().half()
    training = wrapped(model, opts, lr=1e-4)
    factors = []
    for _ in range(6):
        training(torch.full((replicas * accumulation,), 1024.0, dtype=torch.half))
        factors.append(training._optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"].item())
    assert factors == [2, 4, 8, 4, 8, 4]
    assert model.weight.item() == pytest.approx(1 - 6 * 1e-4 * 1024, rel=1e-2), "the factor is divided out"


def test_stochastic_rounding_keeps_small_updates_on_average():
    def weights_after_10_updates(seed, is_stochastic=True):
        opts = options(iterations=10).randomSeed(seed)
        opts.Precision.enableStochasticRounding(is_stochastic)
        weight = nn.Parameter(torch.ones(1000))
        model = Apply(lambda self, x: poptorch.identity_loss(self.weight * x, "sum"), weight=weight)
        return trained(model.half(), torch.ones(10, dtype=torch.half), opts=opts, lr=1e-4).weight.detach()

    assert weights_after_10_updates(1, is_stochastic=False).float().mean() == 1
    weights = weights_after_10_updates(1)
    assert weights.dtype == torch.half
    assert weights.float().mean().item() == pytest.approx(1 - 10e-4, abs=2e-4)
    assert torch.equal(weights, weights_after_10_updates(1))
    assert not torch.equal(weights, weights_after_10_updates(2))


def test_the_update_reads_the_velocity_before_it_is_rounded():
    model = Line()
    training = wrapped(model, lr=1.0, momentum=0.9, velocity_accum_type=torch.half)
    training(torch.tensor([1.0004]))
    assert training._optimizer.state_dict()["ipu_state"]["Accl1___weight"].item() == 1
    assert 1 - model.weight.item() == pytest.approx(1.0004)
    found = [accumulated({"momentum": 0.9, "use_combined_accum": combined}, SMALL) for combined in (False, True)]
    assert found[0] == found[1], "a combined accumulator gives the updates of separate ones"
