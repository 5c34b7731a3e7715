"""Values that are stored in half: accumulators, momentum, weights."""

from __future__ import annotations

import poptorch
import pytest
import torch
from poptorch_models import Line, options


def line(value=1.0):
    model = Line()
    model.weight.data.fill_(value)
    return model


def accumulated(optimizer_arguments, gradients, reduction=poptorch.ReductionType.Sum, strategy=None, replicas=1):
    """Return the change of a weight of 0 in one update with a learning rate of 1."""
    model = line(0.0)
    opts = options(replicas, len(gradients) // replicas)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    if strategy is not None:
        opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, **optimizer_arguments)
    poptorch.trainingModel(model, opts, optimizer)(torch.tensor(gradients))
    return -model.weight.item()


HALF = {"accum_type": torch.half}
# Near 1, half has steps of 2**-10: every addition loses what is smaller than half a step.
SMALL = [1.0, *[0.0004] * 7]


def test_gradients_accumulate_in_float_by_default():
    assert accumulated({}, SMALL) == pytest.approx(1.0028)


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_accumulate_in_half_with_accum_type_half(replicas):
    assert accumulated(HALF, sorted(SMALL * replicas)[::-1], replicas=replicas) == replicas


def test_a_single_micro_batch_is_not_rounded():
    assert accumulated(HALF, [1.0004]) == pytest.approx(1.0004)


def test_the_sum_of_half_overflows_and_the_running_mean_does_not():
    mean = poptorch.ReductionType.Mean
    large = [40000.0] * 3
    for strategy in (None, *poptorch.MeanReductionStrategy):  # wrapping selects Running whatever the options say
        assert accumulated(HALF, large, mean, strategy) == 40000
    assert accumulated({**HALF, "use_combined_accum": True}, large, mean) == float("inf")


def test_a_running_mean_equals_the_mean():
    found = accumulated(HALF, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], poptorch.ReductionType.Mean, replicas=2)
    assert found == pytest.approx(63 / 6, rel=2e-3)


def test_loss_scaling_avoids_underflow_in_half():
    tiny = [1e-8] * 2
    assert accumulated(HALF, tiny) == 0
    assert accumulated({**HALF, "loss_scaling": 2.0**10}, tiny) == pytest.approx(2e-8, rel=2e-3)


def test_the_mean_reduction_strategy_is_fixed_by_compiling():
    model = line()
    training = poptorch.trainingModel(model, options(1, 2), poptorch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(2))
    with pytest.raises(ValueError, match="compiled with MeanReductionStrategy.Post"):
        training.setOptimizer(poptorch.optim.SGD(model.parameters(), lr=0.1, **HALF))


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
    def make():
        model = line()
        arguments = {"momentum": 0.9} if algorithm in ("SGD", "RMSprop") else {}
        chosen = {option: torch.half, "loss_scaling": 8.0, **arguments}
        optimizer = getattr(poptorch.optim, algorithm)(model.parameters(), lr=0.1, **chosen)
        return model, optimizer, poptorch.trainingModel(model, options(), optimizer)

    model, optimizer, training = make()
    training(torch.full((1,), 0.3))
    saved, weight = optimizer.state_dict(), model.weight.item()
    dtypes = {name: tensor.dtype for name, tensor in saved["ipu_state"].items()}
    assert dtypes.pop(quantity) == torch.half
    assert set(dtypes.values()) <= {torch.float32}
    training(torch.full((1,), 0.7))
    twin, twin_optimizer, twin_training = make()
    twin.weight.data.fill_(weight)
    twin_optimizer.load_state_dict(saved)
    twin_training(torch.full((1,), 0.7))
    assert torch.equal(twin.weight, model.weight)


def test_the_velocity_is_stored_with_its_scaling():
    for arguments, scaling in (
        ({"loss_scaling": 4.0}, 4),
        ({"loss_scaling": 4.0, "use_combined_accum": True}, 1),
        ({"velocity_scaling": 16.0, "use_combined_accum": True}, 16),
    ):
        model = line()
        chosen = {"momentum": 0.9, "velocity_accum_type": torch.half, **arguments}
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, **chosen)
        poptorch.trainingModel(model, options(), optimizer)(torch.ones(1))
        name = "Accl___weight" if "use_combined_accum" in arguments else "Accl1___weight"
        assert optimizer.state_dict()["ipu_state"][name].item() == scaling


def test_automatic_loss_scaling_makes_the_loss_scaling_variable():
    for is_automatic in (True, False):
        model = line()
        opts = options()
        opts.Training.setAutomaticLossScaling(is_automatic)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, opts, optimizer)
        training(torch.ones(1))
        optimizer.loss_scaling = 2.0
        if is_automatic:
            training.setOptimizer(optimizer)
            training(torch.ones(1))
            assert model.weight.item() == pytest.approx(0.8)
        else:
            with pytest.raises(poptorch.Error, match="'loss_scaling' was compiled as the constant"):
                training.setOptimizer(optimizer)


class Wide(torch.nn.Module):
    """Many equal weights with a gradient of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1000))

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x, "sum")


def trained_stochastically(seed, is_stochastic=True, updates=20):
    model = Wide().half()
    opts = options(iterations=updates).randomSeed(seed)
    opts.Precision.enableStochasticRounding(is_stochastic)
    poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=1e-4))(
        torch.ones(updates, dtype=torch.half)
    )
    return model.weight.detach().clone()


def test_stochastic_rounding_keeps_small_updates_on_average():
    assert trained_stochastically(1, is_stochastic=False).float().mean() == 1
    weights = trained_stochastically(1)
    assert weights.dtype == torch.half
    assert weights.float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)
    assert torch.equal(weights, trained_stochastically(1))
    assert not torch.equal(weights, trained_stochastically(2))


def test_the_update_reads_the_velocity_before_it_is_rounded():
    model = line(0.0)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, velocity_accum_type=torch.half)
    poptorch.trainingModel(model, options(), optimizer)(torch.tensor([1.0004]))
    assert optimizer.state_dict()["ipu_state"]["Accl1___weight"].item() == 1
    assert -model.weight.item() == pytest.approx(1.0004)


def test_accumulators_in_half_are_added_in_float_over_the_replicas():
    assert accumulated(HALF, [1.0, 0.0004], replicas=2) == pytest.approx(1.0004)


def test_a_combined_accumulator_gives_the_updates_of_separate_ones():
    found = [accumulated({"momentum": 0.9, "use_combined_accum": combined}, SMALL) for combined in (False, True)]
    assert found[0] == found[1]
