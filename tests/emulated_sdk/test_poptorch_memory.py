"""The estimate of the memory of each IPU: what it depends on, its warning, and the Error in strict mode."""

from __future__ import annotations

import gc
import logging
import weakref

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options, wrapped

WIDTH, SAMPLES = 64, 16


class Layers(nn.Module):
    """Linear layers, the first of each IPU's in a block of its own, a checkpoint after every so many, and a loss."""

    def __init__(self, ipus=1, layers=2, checkpoint=0, tanh=True):
        super().__init__()
        self.ipus, self.checkpoint, self.tanh = ipus, checkpoint, tanh
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ipus * layers))

    def forward(self, x):
        size = len(self.layers) // self.ipus
        for ipu in range(self.ipus):
            with poptorch.Block(ipu_id=ipu):
                for number, layer in enumerate(self.layers[ipu * size : (ipu + 1) * size]):
                    x = layer(x).tanh() if self.tanh else layer(x)
                    if self.checkpoint and (number + 1) % self.checkpoint == 0:
                        x = poptorch.recomputationCheckpoint(x)
                if ipu == self.ipus - 1:
                    return poptorch.identity_loss(x.float(), "mean")
        return x


def memory(model, accumulation=8, change=lambda options: None, dtype=torch.float32, **settings):
    opts = options(accumulation=accumulation)
    change(opts)
    training = wrapped(model, opts, **settings)
    samples = SAMPLES * accumulation * opts.replication_factor
    training.compile(torch.zeros(1, WIDTH, dtype=dtype).expand(samples, -1))
    return training.emulatedMemory()


PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH)
ACTIVATION = SAMPLES * WIDTH * 4


def test_weights_gradients_and_state_are_counted_by_their_dtypes():
    (one,) = memory(Layers(), momentum=0.9)
    assert (one.weights, one.gradients, one.optimizer) == (4 * PARAMETERS, 4 * PARAMETERS, 4 * PARAMETERS)
    (half,) = memory(Layers().half(), dtype=torch.half, momentum=0.9, accum_type=torch.half)
    assert (half.weights, half.gradients, half.optimizer) == (2 * PARAMETERS, 2 * PARAMETERS, 4 * PARAMETERS)
    # More than half of it: torch computes the loss in float32, in other steps from version to version.
    assert one.activations == 7 * ACTIVATION
    assert 3.5 * ACTIVATION < half.activations < 6 * ACTIVATION
    (adam,) = memory(Layers(), algorithm="Adam", first_order_momentum_accum_type=torch.half)
    assert adam.optimizer == 6 * PARAMETERS
    (combined,) = memory(Layers(), momentum=0.9, use_combined_accum=True)
    assert combined.optimizer == 0
    (single,) = memory(Layers(), accumulation=1)
    assert (single.gradients, single.optimizer) == (4 * WIDTH * WIDTH, 0)


def test_tensor_locations_reduce_the_optimizer_state():
    def off_chip(opts, is_sharded=False):
        settings = poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(0)
        settings.useReplicatedTensorSharding(is_sharded).minElementsForReplicatedTensorSharding(0)
        opts.TensorLocations.setOptimizerLocation(settings)

    def sharded(opts):
        settings = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
        settings.minElementsForReplicatedTensorSharding(0)
        opts.replicationFactor(2).TensorLocations.setOptimizerLocation(settings)

    (one,) = memory(Layers(), momentum=0.9, change=off_chip)
    assert one.optimizer == 4 * WIDTH * WIDTH  # the largest tensor, while it is used
    (one,) = memory(Layers(), accumulation=1, momentum=0.9, change=sharded)
    assert one.optimizer == 2 * PARAMETERS
    both = lambda opts: off_chip(opts.replicationFactor(2), is_sharded=True)  # noqa: E731
    (one,) = memory(Layers(), accumulation=1, momentum=0.9, change=both)
    assert one.optimizer == 2 * WIDTH * WIDTH  # the part of a replica of the largest tensor


def recomputation(mode):
    return lambda opts: opts._Popart.set("autoRecomputation", mode)


def test_a_pipeline_keeps_the_activations_of_the_micro_batches_in_flight():
    kept = [each.activations for each in memory(Layers(ipus=2), change=recomputation(0))]
    operands = 2 * 2 * ACTIVATION  # of the largest operator, and their gradients
    # The first stage saves its input and the results of its two layers for 3 micro-batches, the last for 1.
    assert [(each - operands) // ACTIVATION for each in kept] == [9, 2]


def test_recomputation_keeps_the_inputs_of_stages_and_checkpoints():
    plain, recomputed = memory(Layers(ipus=2), change=recomputation(0)), memory(Layers(ipus=2))  # the default
    assert recomputed[0].activations < plain[0].activations
    assert recomputed[1].activations == plain[1].activations  # the last stage computes its backward at once
    checkpoints = memory(Layers(ipus=2, checkpoint=1))
    # Two tensors more for each of 3 micro-batches, and two less to compute again at a time.
    assert checkpoints[0].activations - recomputed[0].activations == (2 * 3 - 1) * ACTIVATION
    # The last stage computes again what comes before its last checkpoint, and keeps what follows.
    plain = memory(Layers(ipus=2, layers=8), change=recomputation(0))
    assert memory(Layers(ipus=2, layers=8, checkpoint=4))[1].activations < plain[1].activations
    (without,) = memory(Layers(layers=8), change=recomputation(0))
    (standard,) = memory(Layers(layers=8), change=recomputation(1))
    assert standard.activations < without.activations


def test_a_checkpoint_that_only_the_next_ipu_uses_is_stored_there():
    plain, checkpoints = (memory(Layers(ipus=2, checkpoint=each, tanh=False)) for each in (0, 1))
    # The first of the two for 3 micro-batches, and no longer to compute again; the second is the next stage's input.
    assert checkpoints[0].activations - plain[0].activations == (3 - 1) * ACTIVATION


class Normalized(nn.Module):
    """Has running statistics and a dropout, which a second forward would change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x):
        return poptorch.identity_loss(self.layers[1:](poptorch.recomputationCheckpoint(self.layers[0](x))), "mean")


def test_recomputation_changes_no_bit():
    def trained(mode):
        torch.manual_seed(0)
        model, opts = Normalized(), options(accumulation=2).randomSeed(1)
        recomputation(mode)(opts)
        training = wrapped(model, opts)
        for _ in range(3):
            training(torch.linspace(-1, 1, 64).view(16, 4))
        return {name: value.tolist() for name, value in model.state_dict().items()}

    assert trained(4) == trained(0)


def test_activations_grow_with_the_micro_batch():
    model = poptorch.inferenceModel(nn.Linear(WIDTH, WIDTH))
    model.compile(torch.zeros(2, WIDTH))
    (one,), (eight,) = model.emulatedMemory(), model.emulatedMemory(micro_batch_factor=8)
    assert eight.activations == 8 * one.activations
    assert eight.weights == one.weights == 4 * PARAMETERS // 2
    assert (one.gradients, one.optimizer) == (0, 0)


def compiled_memory(model, inputs):
    executor = poptorch.inferenceModel(model)
    executor.compile(inputs)
    return executor.emulatedMemory()


def test_a_nearly_full_ipu_is_a_warning_and_a_full_one_an_error_in_strict_mode(monkeypatch, caplog):
    model = nn.Linear(WIDTH, WIDTH)
    inputs = torch.zeros(1, WIDTH)
    (needed,) = compiled_memory(model, inputs)
    with caplog.at_level(logging.WARNING, "poptorch"):
        for share, warning in ((0.84, ""), (0.9, "nearly full: IPU 0: 90 %"), (1.1, "Out of memory")):
            # 20 % of the memory are code and exchange.
            size = round((needed.total - needed.code) / (share - 0.2))
            monkeypatch.setattr("poptorch.device.compile.memory_estimate.MEMORY_BYTES", size)
            compiled_memory(model, inputs)
            assert (warning in caplog.text) if warning else not caplog.records
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    executor = poptorch.inferenceModel(model)
    with pytest.raises(poptorch.Error, match=r"Out of memory.*IPU 0: 110 %"):
        executor.compile(inputs)
    assert not executor.isCompiled()


class Saves(torch.autograd.Function):
    """The identity, which keeps a weak reference to what the graph saves."""

    saved = []

    @staticmethod
    def forward(ctx, x):
        ctx.kept = nn.Parameter(x)  # an object that a weak reference can follow
        Saves.saved.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_the_graph_of_the_compilation_is_released_before_the_first_call():
    """Without a collection of reference cycles, which may come many calls later."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return poptorch.identity_loss(Saves.apply(self.layer(x)), "mean")

    Saves.saved.clear()
    training = wrapped(Model(), options(accumulation=1))
    gc.disable()
    try:
        training.compile(torch.zeros(SAMPLES, WIDTH))
        assert [reference() for reference in Saves.saved] == [None] * len(Saves.saved) != []
    finally:
        gc.enable()
