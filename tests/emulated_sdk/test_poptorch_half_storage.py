"""Values that are stored in half: accumulators, momentum, weights."""

from __future__ import annotations

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, Line, options, trained, wrapped

HALF = {"accum_type": torch.half}
# Near 1, half has steps of 2**-10: every addition loses what is smaller than half a step.
SMALL = [1.0, *[0.0004] * 7]
MEAN = poptorch.ReductionType.Mean


def accumulated(arguments, gradients, reduction=poptorch.ReductionType.Sum, strategy=None, replicas=1):
    """Return the change of a weight in one update with a learning rate of 1."""
    model = Line()
    model.weight.data.fill_(0.0)
    opts = options(replicas, len(gradients) // replicas)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    if strategy is not None:
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return -trained(model, torch.tensor(gradients), opts=opts, lr=1.0, **arguments).weight.item()


def test_gradients_accumulate_in_float_by_default_and_in_half_on_request():
    assert accumulated({}, SMALL) == pytest.approx(1.0028)
    for replicas in (1, 2):
        assert accumulated(HALF, sorted(SMALL * replicas)[::-1], replicas=replicas) == replicas
    assert accumulated(HALF, [1.0004]) == pytest.approx(1.0004), "a single micro-batch is not rounded"


def test_accumulators_in_half_are_added_in_float_over_the_replicas():
    assert accumulated(HALF, [1.0, 0.0004], replicas=2) == pytest.approx(1.0004)


def test_the_sum_of_half_overflows_and_the_running_mean_does_not():
    large = [40000.0] * 3
    for strategy in (None, *poptorch.MeanReductionStrategy):  # wrapping selects Running whatever the options say
        assert accumulated(HALF, large, MEAN, strategy) == 40000
    assert accumulated({**HALF, "use_combined_accum": True}, large, MEAN) == float("inf")
    found = accumulated(HALF, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], MEAN, replicas=2)
    assert found == pytest.approx(63 / 6, rel=2e-3)


def test_loss_scaling_avoids_underflow_in_half():
    tiny = [1e-8] * 2
    assert accumulated(HALF, tiny) == 0
    assert accumulated({**HALF, "loss_scaling": 2.0**10}, tiny) == pytest.approx(2e-8, rel=2e-3)


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
    arguments = {"momentum": 0.9} if algorithm in ("SGD", "RMSprop") else {}
    (model, training), (twin, twin_training) = (
        (line, wrapped(line, None, algorithm, loss_scaling=8.0, **{option: torch.half}, **arguments))
        for line in (Line(), Line())
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


def test_the_mean_reduction_strategy_is_fixed_by_compiling():
    training = wrapped(Line(), options(1, 2))
    training(torch.ones(2))
    with pytest.raises(ValueError, match="the executable is already compiled, with Post"):
        training.setOptimizer(poptorch.optim.SGD(training.model.parameters(), lr=0.1, **HALF))


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
    else:
        with pytest.raises(poptorch.Error, match="'loss_scaling' was compiled as the constant"):
            training.setOptimizer(training._optimizer)


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
        model = Apply(
            lambda self, x: poptorch.identity_loss(self.weight * x, "sum"), weight=nn.Parameter(torch.ones(1000))
        )
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


def test_a_combined_accumulator_gives_the_updates_of_separate_ones():
    found = [accumulated({"momentum": 0.9, "use_combined_accum": combined}, SMALL) for combined in (False, True)]
    assert found[0] == found[1]
