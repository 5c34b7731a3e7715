"""Execution strategies: stages, IPUs, blocks, and the limits of a placement."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle

import popdist.poptorch
import poptorch
import pytest
import torch
from poptorch.parallel.placement import check_overlap
from torch import nn

from tests.support.poptorch_models import Apply, batch, options, seeded, wrapped
from tests.support.refused import rejects


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


def compiled_pipeline(ipus, strategy=None, iterations=16, **kwargs):
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
    rejects(poptorch.Error, numbers, lambda: train(ipus, poptorch.PipelinedExecution(), accumulation))
    train(ipus, poptorch.PipelinedExecution(), depth)
    train(ipus, poptorch.ShardedExecution(), 1)


def test_auto_stage_selects_the_ipus_and_declared_stages_group_blocks():
    same, increment = map(poptorch.PipelinedExecution, (poptorch.AutoStage.SameAsIpu, poptorch.AutoStage.AutoIncrement))
    rejects(AssertionError, "no IPU was specified for block 'B1'", compiled_pipeline, (1, None, 0), same)
    free = (None, None, None)
    for ipus, strategy, expected in (((0, 1, 0), same, [0, 1, 0]), (free, increment, [0, 1, 2])):
        assert ipus_of(compiled_pipeline(ipus, strategy)) == expected
    assert ipus_of(compiled_pipeline((0, 1, 0), increment)) == [0, 1, 0]
    for blocks in (poptorch.Stage("B0", "B1"), ["B0", "B1"]):
        strategy = poptorch.PipelinedExecution(blocks, "B2")
        stages = compiled_pipeline(free, strategy).emulatedPlacement().stages
        assert [(stage.ipu, stage.blocks) for stage in stages] == [(0, ("B0", "B1")), (1, ("B2",))]
    strategy.stage("B2").ipu(3)
    assert ipus_of(compiled_pipeline((0, 0, 1), strategy)) == [0, 3]


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


def test_phases_have_ipus_stages_and_options_a_copy_of_their_strategy(tmp_path):
    phases = (["B0"], ["B1"], ["B2"])
    serial = compiled_pipeline((None, None, None), poptorch.SerialPhasedExecution(*phases)).emulatedPlacement()
    parallel = compiled_pipeline((None, None, None), poptorch.ParallelPhasedExecution(*phases)).emulatedPlacement()
    assert [(stage.phase, stage.ipu) for stage in serial.stages] == [(0, 0), (1, 0), (2, 0)]
    assert [(stage.phase, stage.ipu) for stage in parallel.stages] == [(0, 0), (1, 1), (2, 0)]
    with pytest.raises(poptorch.Error, match="'B1' is in phase 1 and on IPU 2"):
        compiled_pipeline((0, 2, 0), poptorch.ParallelPhasedExecution(*phases))
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


def test_every_stage_needs_device_iterations_blocks_are_declared_and_a_process_uses_at_most_64_ipus():
    with pytest.raises(poptorch.Error, match=r"deviceIterations must be .* pipeline stages \(4\).* is 3"):
        compiled_pipeline((0, 1, 2, 3), iterations=3)
    compiled_pipeline((0, 1, 2, 3), iterations=4)
    compiled_pipeline((0, 1, 2, 3), poptorch.ShardedExecution(), iterations=1)
    strategy = poptorch.PipelinedExecution("B0", "B1")
    rejects(AssertionError, "Unknown block 'B2'.*'B0', 'B1'", compiled_pipeline, (0, 0, 0), strategy)
    for strategy in (poptorch.PipelinedExecution("B0", "B1"), poptorch.PipelinedExecution()):
        rejects(AssertionError, "Unknown block 'B9'", strategy.stage, "B9")
    for ipu, replicas in ((64, 1), (0, 128), (32, 2)):
        text = (
            f"Too many IPUs requested \\({(ipu + 1) * replicas}\\)\\. Experiments .* require distributed execution\\."
        )
        arguments = {"iterations": 1, "replicas": replicas}
        rejects(poptorch.Error, text, compiled_pipeline, (ipu,), poptorch.ShardedExecution(), **arguments)


def test_tensors_are_counted_where_they_are_first_used_and_products_by_their_operations():
    model = seeded(Pipeline, ipus=(0, 1))
    model.layers[1].weight = model.layers[0].weight
    model.spare = nn.Parameter(torch.ones(3))
    training = poptorch.trainingModel(model.half(), options(accumulation=3))
    rejects(poptorch.Error, "not been compiled", training.emulatedPlacement)
    training(torch.ones(6, 4).half(), torch.zeros(6, dtype=torch.long))
    placement = training.emulatedPlacement()
    first, second = placement.ipus
    assert set(first.parameters) == {"layers.0.weight", "layers.0.bias"}
    assert set(second.parameters) == {"layers.1.bias", "norm.weight", "norm.bias"}
    assert (first.parameter_elements, first.parameter_bytes) == (20, 40)
    assert (second.parameter_elements, second.buffer_bytes) == (12, 2 * 4 * 2)
    assert "spare" in placement.unused
    assert placement.stages[1].modules == ("layers.1", "norm", "dropout")
    model = poptorch.inferenceModel(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(64, 5)))
    model.compile(batch(2)[0])
    assert model.emulatedPlacement().stages[0].forward_operations == 2 * 2 * 4 * 16 * 27 + 2 * 2 * 64 * 5


def test_a_replica_has_all_ipus_up_to_the_highest_and_a_saved_executable_its_placement(tmp_path):
    model = compiled_pipeline((0, 3), poptorch.ShardedExecution())
    assert model._compiled().traced.changes.copied == (), "recording stages changes no modules"
    placement = model.emulatedPlacement()
    assert (placement.ipus_per_replica, [ipu.stages for ipu in placement.ipus]) == (4, [(0,), (), (), (1,)])
    opts = poptorch.Options().showCompilationProgressBar(False).deviceIterations(3)
    model = seeded(Pipeline, ipus=(0, 1, 2)).eval()
    with pytest.raises(poptorch.Error, match="3 IPUs per replica x 1 replicas = 3 IPUs.*reserve a minimum of 4"):
        poptorch.inferenceModel(model, opts).compile(torch.ones(3, 4))
    poptorch.inferenceModel(model, opts.clone().autoRoundNumIPUs()).compile(torch.ones(3, 4))
    sharded = compiled_pipeline((0, 1), poptorch.ShardedExecution())
    sharded.save(str(tmp_path / "model"), export_model=False)

    def loaded(strategy):
        opts = options(iterations=16).setExecutionStrategy(strategy)
        model = poptorch.inferenceModel(seeded(Pipeline, ipus=(0, 1)), opts)
        model.loadExecutable(str(tmp_path / "model"))
        return model

    assert loaded(poptorch.ShardedExecution()).emulatedPlacement() == sharded.emulatedPlacement()
    rejects(poptorch.Error, "execution strategy", lambda: loaded(poptorch.PipelinedExecution()))


@pytest.mark.parametrize(("ipu", "launched"), [(0, 1), (1, 2), (2, 4), (1, None), (1, 4)])
def test_a_model_needs_the_launched_ipus(monkeypatch, ipu, launched):
    error = "uses 2 IPUs per replica, but the run was launched with 4" if (ipu, launched) == (1, 4) else None
    monkeypatch.delenv("POPDIST_NUM_TOTAL_REPLICAS", raising=False)
    if launched:
        values = {"NUM_TOTAL_REPLICAS": "4", "NUM_LOCAL_REPLICAS": "2", "REPLICA_INDEX_OFFSET": "0"}
        for name, value in {**values, "NUM_IPUS_PER_REPLICA": str(launched)}.items():
            monkeypatch.setenv(f"POPDIST_{name}", value)
    opts = popdist.poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs().deviceIterations(2)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    model = nn.Sequential(nn.Linear(2, 2), poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=ipu))
    inference = poptorch.inferenceModel(model, opts)
    with pytest.raises(poptorch.Error, match=error) if error else contextlib.nullcontext():
        inference.compile(torch.ones(2 * opts.replication_factor, 2))


def overlapping(tiles=32, mode=poptorch.OutputMode.All):
    opts = options().setExecutionStrategy(poptorch.ShardedExecution()).outputMode(mode)
    if tiles:
        opts.TensorLocations.numIOTiles(tiles)
    return opts


def test_overlap_needs_io_tiles_no_pipelined_execution_and_outputs_that_are_all_or_summed():
    for mode, transfers in (("All", ["outputs"]), ("Sum", ["outputs"]), ("Final", ["inputs"])):
        check_overlap(overlapping(mode=poptorch.OutputMode[mode]), transfers)
    with pytest.raises(poptorch.Error, match="not supported with poptorch.PipelinedExecution"):
        check_overlap(overlapping().setExecutionStrategy(poptorch.PipelinedExecution()), ["outputs"])
    rejects(poptorch.Error, "allocate at least 32 IO tiles", lambda: check_overlap(overlapping(tiles=0), ["inputs"]))
    with pytest.raises(poptorch.Error, match="not Final"):
        check_overlap(overlapping(mode=poptorch.OutputMode.Final), ["outputs"])
    overlaps = Apply(lambda x: poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapDeviceIterationLoop) + 1)
    with pytest.raises(poptorch.Error, match="Overlapped IO"):
        poptorch.inferenceModel(overlaps, options()).compile(torch.ones(2, 2))
    poptorch.inferenceModel(overlaps, overlapping()).compile(torch.ones(2, 2))


def stages_of(model, iterations=8, auto_stage=poptorch.AutoStage.SameAsIpu):
    opts = options(iterations=iterations).setExecutionStrategy(poptorch.PipelinedExecution(auto_stage))
    inference = poptorch.inferenceModel(model, opts)
    inference.compile(torch.ones(iterations, 2))
    return [(stage.ipu, stage.blocks, stage.modules) for stage in inference.emulatedPlacement().stages]


def placed(forward):
    return [(ipu, blocks) for ipu, blocks, _ in stages_of(Apply(forward))]


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))


def in_blocks(*blocks):
    def forward(x):
        for name, ipu in blocks:
            with poptorch.Block(name, ipu_id=ipu):
                x = x + 1
        return x

    return forward


def test_a_block_without_operations_needs_no_ipu_and_use_auto_id_numbers_those_without_id():
    def forward(x):
        with poptorch.Block(ipu_id=3):
            one = torch.ones(2)
        poptorch.Block.start("rest", ipu_id=0)
        return x + one

    def numbered(x):
        poptorch.Block.useAutoId()
        return in_blocks((None, 0), ("special", 1), (None, 2))(x)

    assert placed(forward) == [(0, ("rest",))]
    assert placed(numbered) == [(0, ("0",)), (1, ("special",)), (2, ("1",))]


def test_block_functions_begin_blocks_and_reprs_have_them(capsys):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[1], user_id=1, ipu_id=2)
    assert "(1): BeginBlock(user_id=1, ipu_id=2) ReLU()" in poptorch.module_repr(copy.deepcopy(model))
    assert repr(poptorch.inferenceModel(model, options())) == poptorch.module_repr(model)
    poptorch.print(model)
    assert capsys.readouterr().out == poptorch.module_repr(model) + "\n"

    @poptorch.BlockFunction("body", ipu_id=1)
    def body(x, *, plus):
        return x + plus

    tail = poptorch.BeginBlock(torch.tanh, "tail", ipu_id=2)
    assert isinstance(tail, poptorch.LegacyBeginBlockFn)
    assert placed(lambda x: tail(body(x + 1, plus=1))) == [(0, ()), (1, ("body",)), (2, ("tail",))]
    assert body.__name__ == "body"


def test_begin_block_lasts_until_the_next_and_changes_nothing_outside_a_wrapped_model():
    model = layers()
    keys, kind, text = list(model.state_dict()), type(model[1]), repr(model)
    assert poptorch.BeginBlock(model[1], "tail", ipu_id=1) is model[1]
    assert (list(model.state_dict()), type(model[1]), repr(model)) == (keys, kind, text)
    assert b"poptorch." not in pickle.dumps(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False) if torch.__version__ >= "2.6" else torch.load(buffer)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        assert stages_of(twin, iterations=2) == [(0, (), ("0",)), (1, ("tail",), ("1", "2"))]
    model = layers()
    expected = model(torch.ones(2, 2))
    poptorch.BeginBlock(model[0], ipu_id=5)
    poptorch.Block.useAutoId()
    poptorch.Block.start("anything", 70)
    with poptorch.Block("unknown", ipu_id=99):
        assert torch.equal(model(torch.ones(2, 2)), expected)
    assert not list(poptorch.Block("unknown").parameters())


def test_a_stage_starts_where_the_ipu_changes_even_to_an_earlier_one_and_all_operations_are_in_blocks():
    assert placed(lambda x: x + 1) == [(0, ())]
    found = placed(in_blocks(("a", 0), ("b", 0), ("c", 1), (3, 0)))
    assert found == [(0, ("a", "b")), (1, ("c",)), (0, (3,))]

    def nested(x):
        with poptorch.Block("outer", ipu_id=1):
            return in_blocks(("inner", 2))(x) + 1

    for forward in (nested, lambda x: in_blocks((None, 0))(x) * 2):
        rejects(poptorch.Error, "No active Block, all the ops must belong to a Block", placed, forward)
    begin = lambda **bad: poptorch.BeginBlock(nn.Linear(1, 1), **bad)  # noqa: E731
    for bad in ({"user_id": 3.0}, {"ipu_id": -1}, {"ipu_id": "1"}, {"ipu_id": True}, {"ipu_id": 0.5}):
        for make in (poptorch.Block, poptorch.Block.start, poptorch.BlockFunction, begin):
            rejects(AssertionError, "got", make, **bad)


def test_a_layer_is_a_module_or_function_without_a_block_and_an_attribute_a_dictionary():
    rejects(poptorch.Error, "not int", poptorch.BeginBlock, 3)
    rejects(AssertionError, "not int", poptorch.removeBlocks, 3)
    layer = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=1)
    rejects(poptorch.Error, "already been called on this Linear", poptorch.BeginBlock, layer, ipu_id=0)
    poptorch.removeBlocks(nn.Sequential(layer))
    poptorch.BeginBlock(layer, ipu_id=0)
    with poptorch.Attribute(__outline={"layer": "embedding"}) as context:
        assert context is None
    rejects(AssertionError, "__outline", poptorch.Attribute, __outline="embedding")


def test_a_layer_starts_its_block_in_a_closure_and_layers_with_the_same_id_0_are_in_one():
    base = layers()
    for ipu, layer in enumerate(base):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    model = Apply(lambda model, x: base(x), base=base)
    assert [(ipu, modules) for ipu, _, modules in stages_of(model)] == [(n, (f"base.{n}",)) for n in range(3)]
    model = nn.Sequential(*(poptorch.BeginBlock(layer, user_id=0) for layer in layers()))
    assert stages_of(model, auto_stage=poptorch.AutoStage.AutoIncrement) == [(0, (0,), ("0", "1", "2"))]
