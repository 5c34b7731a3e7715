"""The estimate of the memory of each IPU, and the memory format of the emulated device."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from typing import Dict

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, options, seeded, wrapped
from tests.support.ranks import run_ranks
from tests.support.refused import rejects

WIDTH, SAMPLES = 64, 16


class Layers(nn.Module):
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


def test_tensor_locations_reduce_the_optimizer_state():
    def settings(replicas, is_on_chip, is_sharded):
        location = poptorch.TensorLocationSettings().useOnChipStorage(is_on_chip).minElementsForOffChip(0)
        location.useReplicatedTensorSharding(is_sharded).minElementsForReplicatedTensorSharding(0)
        return lambda opts: opts.replicationFactor(replicas).TensorLocations.setOptimizerLocation(location)

    for accumulation, change, expected in (
        (8, settings(1, False, False), 4 * WIDTH * WIDTH),  # the largest tensor, while it is used
        (1, settings(2, True, True), 2 * PARAMETERS),
        (1, settings(2, False, True), 2 * WIDTH * WIDTH),  # the part of a replica of the largest tensor
    ):
        (one,) = memory(Layers(), accumulation, change, momentum=0.9)
        assert one.optimizer == expected


def recomputation(mode):
    return lambda opts: opts._Popart.set("autoRecomputation", mode)


def test_a_pipeline_keeps_activations_in_flight_or_with_recomputation_inputs_of_stages_and_checkpoints():
    kept = [each.activations for each in memory(Layers(ipus=2), change=recomputation(0))]
    operands = 2 * 2 * ACTIVATION  # of the largest operator, and their gradients
    # The first stage saves its input and the results of its two layers for 3 micro-batches, the last for 1.
    assert [(each - operands) // ACTIVATION for each in kept] == [9, 2]
    plain, recomputed = memory(Layers(ipus=2), change=recomputation(0)), memory(Layers(ipus=2))  # the default
    assert recomputed[0].activations < plain[0].activations
    assert recomputed[1].activations == plain[1].activations  # the last stage computes its backward at once
    checkpoints = memory(Layers(ipus=2, checkpoint=1))
    # Two tensors more for each of 3 micro-batches, and two less to compute again at a time.
    assert checkpoints[0].activations - recomputed[0].activations == (2 * 3 - 1) * ACTIVATION
    # The last stage computes again what comes before its last checkpoint, and keeps what follows.
    plain = memory(Layers(ipus=2, layers=8), change=recomputation(0))
    assert memory(Layers(ipus=2, layers=8, checkpoint=4))[1].activations < plain[1].activations
    (without,), (standard,) = (memory(Layers(layers=8), change=recomputation(mode)) for mode in (0, 1))
    assert standard.activations < without.activations
    # The checkpoint that only the next IPU uses is that stage's input; the other is stored for 3 micro-batches.
    plain, checkpoints = (memory(Layers(ipus=2, checkpoint=each, tanh=False)) for each in (0, 1))
    assert checkpoints[0].activations - plain[0].activations == (3 - 1) * ACTIVATION


def test_recomputation_changes_no_bit():
    def forward(model, x):  # has running statistics and a dropout, which a second forward would change
        return poptorch.identity_loss(model.layers(poptorch.recomputationCheckpoint(model.first(x))), "mean")

    def state_after_training(mode):
        torch.manual_seed(0)
        first, *layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        model, opts = Apply(forward, first=first, layers=nn.Sequential(*layers)), options(accumulation=2).randomSeed(1)
        recomputation(mode)(opts)
        training = wrapped(model, opts)
        for _ in range(3):
            training(torch.linspace(-1, 1, 64).view(16, 4))
        return {name: value.tolist() for name, value in model.state_dict().items()}

    assert state_after_training(4) == state_after_training(0)


def compiled_memory(model, inputs, **arguments):
    executor = poptorch.inferenceModel(model)
    executor.compile(inputs)
    return executor.emulatedMemory(**arguments)


def test_weights_gradients_state_and_activations_are_counted():
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
    model = nn.Linear(WIDTH, WIDTH)
    (one,), (eight,) = (compiled_memory(model, torch.zeros(2, WIDTH), micro_batch_factor=each) for each in (1, 8))
    assert eight.activations == 8 * one.activations
    assert eight.weights == one.weights == 4 * PARAMETERS // 2
    assert (one.gradients, one.optimizer) == (0, 0)


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
    rejects(poptorch.Error, r"Out of memory.*IPU 0: 110 %", executor.compile, inputs)
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
    forward = lambda model, x: poptorch.identity_loss(Saves.apply(model.layer(x)), "mean")  # noqa: E731
    Saves.saved.clear()
    training = wrapped(Apply(forward, layer=nn.Linear(WIDTH, WIDTH)), options(accumulation=1))
    gc.disable()
    try:
        training.compile(torch.zeros(SAMPLES, WIDTH))
        assert [reference() for reference in Saves.saved] == [None] * len(Saves.saved) != []
    finally:
        gc.enable()


VARIABLE = "EMULATED_POD_MEMORY_FORMAT"
MANY_WEIGHTS = {"channels": 256}


class Net(nn.Module):
    """Has 4,608 weights in 2-D convolutions per channel; `flatten` says how the activations become rows."""

    def __init__(self, flatten="flatten", dtype=torch.float32, layers=True, channels=8):
        super().__init__()
        self.flatten, self.dtype = flatten, dtype
        first = nn.Conv2d(3, channels, 3, padding=1)
        self.features = nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU()) if layers else nn.Identity()
        self.deep = nn.Conv2d(channels, 512, 3, stride=2) if layers else nn.Identity()  # computed as a product
        self.head = nn.Linear(512 if layers else 3 * 16, 10)

    def forward(self, images, labels):
        features = self.features(images.to(self.dtype))
        if self.flatten == "view":
            features.view(features.shape[0], -1)
        logits = self.head(self.deep(features).flatten(1))
        return features, nn.functional.cross_entropy(logits.float(), labels)


def train(arguments, replicas=1, updates=3, rank=0, size=1):
    opts = options(replicas // size, accumulation=2)
    opts.Distributed.configureProcessId(rank, size)
    training = wrapped(seeded(Net, **arguments), opts, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        images = torch.randn(2, replicas, 2, 3, 4, 4, generator=generator)  # step, replica, sample
        labels = torch.arange(10)[: 2 * replicas].expand(2, -1).reshape(2, replicas, 2)
        mine = slice(rank * replicas // size, (rank + 1) * replicas // size)
        outputs = training(*(each[:, mine].flatten(0, 2).contiguous() for each in (images, labels)))
        assert outputs[0].is_contiguous(), "a program may take a view of an output"
    return training


def trained_in_both(rank: int, size: int) -> Dict[str, Dict[str, torch.Tensor]]:
    found = {}
    for name in ("contiguous", "channels_last"):
        os.environ[VARIABLE] = name
        training = train({}, replicas=2, rank=rank, size=size)
        training.copyWeightsToHost()
        model = {key: value.clone() for key, value in training.model.state_dict().items()}
        found[name] = {**model, **training._optimizer.state_dict()["ipu_state"]}
    return found


@pytest.mark.parametrize(
    ("request_", "arguments", "chosen"),
    [
        (None, MANY_WEIGHTS, "channels_last"),
        ("", MANY_WEIGHTS, "channels_last"),
        ("auto", MANY_WEIGHTS, "channels_last"),
        ("auto", {}, "contiguous"),
        ("auto", {**MANY_WEIGHTS, "flatten": "view"}, "contiguous"),
        ("auto", {"layers": False}, "contiguous"),
        ("auto", {**MANY_WEIGHTS, "dtype": torch.half}, "contiguous"),
        ("channels_last", {}, "channels_last"),
        ("channels_last", {"layers": False}, "contiguous"),
        ("contiguous", {}, "contiguous"),
    ],
)
def test_the_format_depends_on_the_request_the_model_and_its_forward(monkeypatch, request_, arguments, chosen):
    monkeypatch.delenv(VARIABLE, raising=False)
    if request_ is not None:
        monkeypatch.setenv(VARIABLE, request_)
    assert train(arguments, updates=1).emulatedMemoryFormat() == chosen


def test_an_unknown_format_and_a_view_in_a_requested_format_are_errors(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nhwc")
    rejects(poptorch.Error, "'nhwc' is no memory format; set it to auto, contiguous or channels_last", train, {})
    monkeypatch.setenv(VARIABLE, "channels_last")
    with pytest.raises(poptorch.Error, match="forward takes a view that only contiguous activations have. Use reshape"):
        train({"flatten": "view"})


def test_weights_optimizer_state_and_checkpoints_fit_both_formats_and_every_placement(monkeypatch, processes):
    monkeypatch.setenv(VARIABLE, "")  # is restored after the test
    states = trained_in_both(0, 1)
    for name, tensor in states["channels_last"].items():
        other = states["contiguous"][name]
        assert tensor.is_contiguous(), name
        assert tensor.stride() == other.stride()
        assert torch.allclose(tensor, other, atol=1e-5), name
    assert not torch.equal(*(states[name]["deep.weight"] for name in states))
    for found in run_ranks(__file__, ["trained_in_both"], 2)["trained_in_both"]:
        for name, values in states.items():
            different = {key for key, value in values.items() if not torch.equal(found[name][key], value)}
            assert not {key for key in different if "running" not in key}, "only statistics are those of a replica"
