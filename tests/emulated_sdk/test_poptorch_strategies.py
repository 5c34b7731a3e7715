"""Execution strategies: stages, IPUs, and their limits."""

from __future__ import annotations

import copy
import functools

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import batch, options, seeded, wrapped


class Pipeline(nn.Module):
    """A classifier of linear layers, each a block "B<n>" on its IPU in `ipus`; None for the strategy's choice."""

    def __init__(self, ipus):
        super().__init__()
        self.ipus = ipus
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in ipus)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.2)

    def forward(self, x, labels=None):
        for number, (layer, ipu) in enumerate(zip(self.layers, self.ipus)):
            with poptorch.Block(f"B{number}", ipu_id=ipu):
                x = torch.tanh(layer(x))
        with poptorch.Block(f"B{len(self.layers) - 1}"):
            x = self.dropout(self.norm(x))
            return x if labels is None else (x, nn.functional.cross_entropy(x, labels))


def compiled(ipus, strategy=None, iterations=16, **kwargs):
    """Return a compiled inference model of a `Pipeline`."""
    opts = options(iterations=iterations, **kwargs)
    if strategy is not None:
        opts.setExecutionStrategy(strategy)
    model = poptorch.inferenceModel(seeded(Pipeline, ipus=ipus), opts)
    model.compile(torch.ones(2 * iterations * opts.replication_factor, 4))
    return model


def ipus_of(model):
    return [stage.ipu for stage in model.emulatedPlacement().stages]


@functools.lru_cache(maxsize=None)
def train(ipus, strategy, accumulation=5, replicas=1):
    """Return weights, buffers and outputs after two updates."""
    model = seeded(Pipeline, ipus=ipus)
    opts = options(replicas, accumulation).randomSeed(5).outputMode(poptorch.OutputMode.All)
    training = wrapped(model, opts.setExecutionStrategy(strategy), "Adam")
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for _ in range(2):
        x = torch.randn(3 * accumulation * replicas, 4, generator=generator)
        outputs += training(x, torch.arange(len(x)) % 4)
    return [*outputs, *(tensor.clone() for tensor in model.state_dict().values())]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "strategy",
    [
        poptorch.PipelinedExecution(),
        poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement),
        poptorch.SerialPhasedExecution(["B0", "B1"], ["B2"]),
        poptorch.ParallelPhasedExecution(["B0"], ["B1"], ["B2"]),
    ],
    ids=lambda strategy: strategy.name,
)
def test_training_has_the_same_bits_with_every_strategy(strategy, replicas):
    plain = train((0, 0, 0), poptorch.PipelinedExecution(), replicas=replicas)
    ipus = (0, 1, 2) if strategy.name == "pipelined" else (None, None, None)
    assert all(map(torch.equal, train(ipus, strategy, replicas=replicas), plain))


@pytest.mark.parametrize(("forward_stages", "accumulation"), [(2, 2), (4, 6)])
def test_pipelined_training_needs_accumulation_of_the_pipeline_depth(forward_stages, accumulation):
    ipus, depth = tuple(range(forward_stages)), 2 * forward_stages - 1
    numbers = f"gradientAccumulation must be .* pipeline stages \\({depth}\\).* is {accumulation}"
    with pytest.raises(poptorch.Error, match=numbers):
        train(ipus, poptorch.PipelinedExecution(), accumulation)
    train(ipus, poptorch.PipelinedExecution(), depth)
    train(ipus, poptorch.ShardedExecution(), 1)


def test_pipelined_inference_needs_device_iterations_for_every_stage():
    with pytest.raises(poptorch.Error, match=r"deviceIterations must be .* pipeline stages \(4\).* is 3"):
        compiled((0, 1, 2, 3), iterations=3)
    compiled((0, 1, 2, 3), iterations=4)
    compiled((0, 1, 2, 3), poptorch.ShardedExecution(), iterations=1)


def test_auto_stage():
    same, increment = poptorch.AutoStage.SameAsIpu, poptorch.AutoStage.AutoIncrement
    assert ipus_of(compiled((0, 1, 0), poptorch.PipelinedExecution(same))) == [0, 1, 0]
    with pytest.raises(AssertionError, match="no IPU was specified for block 'B1'"):
        compiled((1, None, 0), poptorch.PipelinedExecution(same))
    assert ipus_of(compiled((None, None, None), poptorch.PipelinedExecution(increment))) == [0, 1, 2]
    assert ipus_of(compiled((0, 1, 0), poptorch.PipelinedExecution(increment))) == [0, 1, 0]


def test_declared_stages_group_blocks_and_set_ipus():
    for strategy in (
        poptorch.PipelinedExecution(poptorch.Stage("B0", "B1"), "B2"),
        poptorch.PipelinedExecution(["B0", "B1"], "B2"),
    ):
        stages = compiled((None, None, None), strategy).emulatedPlacement().stages
        assert [(stage.ipu, stage.blocks) for stage in stages] == [(0, ("B0", "B1")), (1, ("B2",))]
    strategy.stage("B2").ipu(3)
    assert ipus_of(compiled((0, 0, 1), strategy)) == [0, 3]


def test_undeclared_block_raises_error():
    with pytest.raises(AssertionError, match="Unknown block 'B2'.*'B0', 'B1'"):
        compiled((0, 0, 0), poptorch.PipelinedExecution("B0", "B1"))
    for blocks in (("B0", "B1"), ()):
        with pytest.raises(AssertionError, match="Unknown block 'B9'"):
            poptorch.PipelinedExecution(*blocks).stage("B9")


@pytest.mark.parametrize(
    "make",
    [
        lambda: poptorch.Stage(),
        lambda: poptorch.Stage(1),
        lambda: poptorch.Stage("A").ipu(-1),
        lambda: poptorch.Phase(),
        lambda: poptorch.Phase("A", poptorch.Stage("B")),
        lambda: poptorch.Phase("A").ipus(0, 1),
        lambda: poptorch.PipelinedExecution("A", 3),
        lambda: poptorch.PipelinedExecution("A", "A"),
        lambda: poptorch.ShardedExecution(poptorch.Stage("A", "B"), "B"),
        lambda: poptorch.SerialPhasedExecution(["A"], 3),
        lambda: poptorch.SerialPhasedExecution(),
        lambda: poptorch.SerialPhasedExecution(["A"]).setTensorsLiveness(1),
        lambda: poptorch.SerialPhasedExecution(["A"]).useSeparateBackwardPhase(1),
    ],
)
def test_invalid_declarations_raise_error(make):
    with pytest.raises(AssertionError):
        make()


def test_ipus_of_phases():
    phases = (["B0"], ["B1"], ["B2"])
    serial = compiled((None, None, None), poptorch.SerialPhasedExecution(*phases)).emulatedPlacement()
    parallel = compiled((None, None, None), poptorch.ParallelPhasedExecution(*phases)).emulatedPlacement()
    assert [(stage.phase, stage.ipu) for stage in serial.stages] == [(0, 0), (1, 0), (2, 0)]
    assert [(stage.phase, stage.ipu) for stage in parallel.stages] == [(0, 0), (1, 1), (2, 0)]
    with pytest.raises(poptorch.Error, match="'B1' is in phase 1 and on IPU 2"):
        compiled((0, 2, 0), poptorch.ParallelPhasedExecution(*phases))


def test_phases_have_stages_and_options_a_copy_of_their_strategy(tmp_path):
    phase = poptorch.Phase(poptorch.Stage("A"), poptorch.Stage("B"))
    assert phase.ipus(2, 3) is None
    assert [phase.stage(index).blocks for index in (0, 1)] == [("A",), ("B",)]
    assert poptorch.Phase("A", "B").stage(0).blocks == ("A", "B")
    strategy = poptorch.ParallelPhasedExecution([phase, ["C"]])
    assert strategy.phase(0) is phase
    assert strategy.useSeparateBackwardPhase().sendTensorsOffChipAfterFwd() is strategy
    strategy = poptorch.SerialPhasedExecution(["A"]).setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd)
    opts = poptorch.Options().setExecutionStrategy(strategy).outputMode(poptorch.OutputMode.All)
    values = opts.toDict()
    assert (values["execution_mode"], values["serial_phases_execution"], values["tensors_liveness"]) == (2, True, 1)
    copy.deepcopy(opts)._execution_strategy.stage("A").ipu(7)
    assert strategy.stage("A")._ipu_id is None
    (tmp_path / "options").write_text("setExecutionStrategy(poptorch.ShardedExecution(AutoStage.AutoIncrement))\n")
    opts = poptorch.Options().loadFromFile(str(tmp_path / "options")).outputMode(poptorch.OutputMode.All)
    assert (opts.toDict()["execution_mode"], opts._execution_strategy._to_dict()["auto_stage"]) == (1, 1)


def test_replica_has_all_ipus_up_to_the_highest_a_power_of_two_unless_rounded():
    model = compiled((0, 3), poptorch.ShardedExecution())
    assert model._compiled().traced.changes.copied == (), "recording stages changes no modules"
    placement = model.emulatedPlacement()
    assert placement.ipus_per_replica == 4
    assert [ipu.stages for ipu in placement.ipus] == [(0,), (), (), (1,)]
    opts = poptorch.Options().showCompilationProgressBar(False).deviceIterations(3)
    model = seeded(Pipeline, ipus=(0, 1, 2)).eval()
    with pytest.raises(poptorch.Error, match="3 IPUs per replica x 1 replicas = 3 IPUs.*reserve a minimum of 4"):
        poptorch.inferenceModel(model, opts).compile(torch.ones(3, 4))
    poptorch.inferenceModel(model, opts.clone().autoRoundNumIPUs()).compile(torch.ones(3, 4))


@pytest.mark.parametrize(("ipu", "replicas"), [(64, 1), (0, 128), (32, 2)])
def test_process_uses_at_most_64_ipus(ipu, replicas):
    text = f"Too many IPUs requested \\({(ipu + 1) * replicas}\\)\\. Experiments .* require distributed execution\\."
    with pytest.raises(poptorch.Error, match=text):
        compiled((ipu,), poptorch.ShardedExecution(), iterations=1, replicas=replicas)


def test_tensor_is_counted_where_it_is_first_used():
    model = seeded(Pipeline, ipus=(0, 1))
    model.layers[1].weight = model.layers[0].weight
    model.spare = nn.Parameter(torch.ones(3))
    training = poptorch.trainingModel(model.half(), options(accumulation=3))
    with pytest.raises(poptorch.Error, match="not been compiled"):
        training.emulatedPlacement()
    training(torch.ones(6, 4).half(), torch.zeros(6, dtype=torch.long))
    placement = training.emulatedPlacement()
    first, second = placement.ipus
    assert set(first.parameters) == {"layers.0.weight", "layers.0.bias"}
    assert set(second.parameters) == {"layers.1.bias", "norm.weight", "norm.bias"}
    assert (first.parameter_elements, first.parameter_bytes) == (20, 40)
    assert (second.parameter_elements, second.buffer_bytes) == (12, 2 * 4 * 2)
    assert "spare" in placement.unused
    assert placement.stages[1].modules == ("layers.1", "norm", "dropout")


def test_matrix_products_and_convolutions_are_counted():
    model = poptorch.inferenceModel(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(64, 5)))
    model.compile(batch(2)[0])
    assert model.emulatedPlacement().stages[0].forward_operations == 2 * 2 * 4 * 16 * 27 + 2 * 2 * 64 * 5


def test_saved_executable_keeps_placement_and_needs_its_strategy(tmp_path):
    sharded = compiled((0, 1), poptorch.ShardedExecution())
    sharded.save(str(tmp_path / "model"), export_model=False)

    def loaded(strategy):
        opts = options(iterations=16).setExecutionStrategy(strategy)
        model = poptorch.inferenceModel(seeded(Pipeline, ipus=(0, 1)), opts)
        model.loadExecutable(str(tmp_path / "model"))
        return model

    assert loaded(poptorch.ShardedExecution()).emulatedPlacement() == sharded.emulatedPlacement()
    with pytest.raises(poptorch.Error, match="execution strategy"):
        loaded(poptorch.PipelinedExecution())
