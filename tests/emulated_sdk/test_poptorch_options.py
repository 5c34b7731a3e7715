"""`poptorch.Options`: every setter, values, types, freezing, environment variables, and options as text."""

from __future__ import annotations

import copy
import inspect
import json
import operator
import pickle
import re
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import popart
import poptorch
import pytest
import torch

from tests.support.poptorch_models import on_device, wrapped
from tests.support.refused import rejects

Options = poptorch.Options


def test_data_loader_freezes_options_but_not_a_copy():
    opts = Options()
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(torch.arange(4)))
    rejects(AttributeError, "Can't modify frozen Options", opts.deviceIterations, 2)
    rejects(AttributeError, "frozen", opts.Training.gradientAccumulation, 2)
    for copied in (copy.deepcopy, Options.clone):
        clone = copied(opts).deviceIterations(2)
        clone.Training.gradientAccumulation(2)
        clone.Precision.enableFloatingPointExceptions(True)
        assert (opts.device_iterations, clone.device_iterations) == (1, 2)


@pytest.mark.parametrize(
    ("setter", "arguments", "error", "message"),
    [
        ("inputReplicaGrouping", (2, poptorch.CommGroupType.All), ValueError, "All"),
        ("inputReplicaGrouping", (3, poptorch.CommGroupType.Consecutive), ValueError, "factor of replication_factor"),
        ("Precision.setPartialsType", (torch.bfloat16,), ValueError, "bfloat16"),
        ("Jit.traceModel", (True,), ValueError, "no longer supported"),
        ("Distributed.configureProcessId", (2, 2), ValueError, "2 is out of range for 2"),
        ("setAvailableMemoryProportion", ({"IPU0": 1.5},), AssertionError, "IPU0"),
        ("setAvailableMemoryProportion", ({"GPU0": 0.5},), AssertionError, "GPU0"),
        ("TensorLocations.numIOTiles", (31,), AssertionError, "31"),
        ("anchorMode", (poptorch.OutputMode.All,), AttributeError, "outputMode"),
    ],
)
def test_values_that_the_sdk_rejects_raise_error_at_the_setter(setter, arguments, error, message):
    opts = Options().replicationFactor(2)
    rejects(error, message, lambda: operator.attrgetter(setter)(opts)(*arguments))


def test_output_mode_is_default_until_set_and_a_reduction_is_sum_or_mean():
    opts = Options()
    assert opts.defaultOutputMode()
    for period in (None, 0, -1):
        with pytest.raises(AssertionError, match="output_return_period"):
            Options().outputMode(poptorch.OutputMode.EveryN, period)
    rejects(AssertionError, "output mode", opts.toDict)
    assert not opts.outputMode(poptorch.OutputMode.Sum).defaultOutputMode()
    with pytest.raises(ValueError, match="Sum"):
        Options().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)
    assert Options().inputReplicaGrouping(2, poptorch.CommGroupType.NoGrouping).input_group_size == 1


def test_distributed_options_and_defaults_are_read_from_the_environment(monkeypatch):
    defaults = {"Training.gradientAccumulation": 4, "outputMode": ["OutputMode.EveryN", 2]}
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(defaults))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/some/where")
    opts = Options()
    assert opts.Training.gradient_accumulation == 4
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    assert opts._Popart.options["cachePath"] == "/some/where"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    opts = Options().replicationFactor(2).outputMode(poptorch.OutputMode.All)
    assert (opts.Distributed.processId, opts.Distributed.numProcesses) == (3, 4)
    assert (opts.toDict()["num_distributed_processes"], opts.Distributed.disable().numProcesses) == (4, 1)
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert opts.Distributed.setEnvVarNames("SIZE", "RANK").processId == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    rejects(ValueError, "OMPI_COMM_WORLD_RANK='first' is not an integer", Options)


def test_files_and_json_have_setters_with_all_names_and_an_error_names_the_line(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text(
        "# comment\n\ndeviceIterations(5)\nTraining.gradientAccumulation(3)\noutputMode(OutputMode.Sum)\n"
        "setExecutionStrategy(poptorch.ShardedExecution())\n"
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
        "_Popart.set('hardwareInstrumentations', set([0, 1]))\n"
        "Precision.setPartialsType(torch.half)\n"
    )
    opts = Options().loadFromFile(str(path))
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (5, 3)
    assert opts.output_mode == poptorch.OutputMode.Sum
    assert opts._Popart.options["hardwareInstrumentations"] == {0, 1}
    assert opts._Popart.options["convolutionOptions"] == {"partialsType": "half"}
    for line, error in (
        ("deviceIterations(", "SyntaxError"),
        ("noSuchSetter(1)", "AttributeError"),
        ("deviceIterations(0)", "AssertionError"),
    ):
        path.write_text(f"deviceIterations(1)\n\n{line}\n")
        expected = f"{error} at line 2 of options.txt: .*> options.{re.escape(line)}"
        rejects(poptorch.ConfigFileError, f"(?s){expected}", lambda: Options().loadFromFile(str(path)))
    opts = Options().from_json(
        '{"Precision.setPartialsType": "torch.half", "outputMode": "poptorch.OutputMode.All",'
        ' "setAvailableMemoryProportion": {"IPU0": 0.1}, "sourceLocationExcludes": [["a", "b"]]}'
    )
    assert opts._Popart.options["partialsTypeMatMuls"] == "half"
    assert opts.output_mode == poptorch.OutputMode.All
    assert (opts.available_memory_proportion, opts._source_location_excludes) == ({0: 0.1}, ["a", "b"])
    for text, error, message in (
        ("[1]", ValueError, "an object"),
        ("{", ValueError, "line 1"),
        ('{"noSuch": 1}', AttributeError, "noSuch"),
        ('{"device_iterations": 2}', AttributeError, "not a setter"),
        ('{"deviceIterations": "2"}', AssertionError, "device_iterations"),
    ):
        with pytest.raises(error, match=message):
            Options().from_json(text)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("typo", 1, "Unknown uint64 option typo"),
        ("enableOutlining", 2, "Unknown uint64 option enableOutlining"),
        ("enableOutlining", None, "Unknown value type NoneType for option enableOutlining"),
        ("patterns", {"PadSum": True}, "patterns_level"),
        (None, {"PadSum": True, "NoSuchPattern": True}, "Unknown pattern 'NoSuchPattern'"),
    ],
)
def test_unknown_option_of_the_compiler_is_an_error_at_compilation(name, value, error):
    opts = Options()
    if name:
        opts._Popart.set(name, value)
    else:
        opts._Popart.setPatterns(value)
    rejects(poptorch.Error, error, lambda: poptorch.inferenceModel(torch.nn.ReLU(), opts).compile(torch.zeros(1)))


def test_options_of_groups_and_of_the_compiler_are_attributes_by_their_names_in_the_sdk():
    opts = Options().enableSyntheticData(2).enableStableNorm(None)
    opts.Precision.enableStochasticRounding(None)
    assert opts._Popart.options["syntheticDataMode"] == 2
    assert opts._Popart.options["enableStochasticRounding"] is None
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", 1)
    opts._Popart.setEngineOptions({"target.hostSyncTimeout": "3000"})
    assert opts._Popart.options["engineOptions"] == {"target.hostSyncTimeout": "3000"}
    opts = Options()
    opts._Popart.set("syntheticDataMode", 2)
    assert on_device(torch.relu, torch.ones(2), opts=opts).tolist() == [0, 0]
    opts = Options().useOfflineIpuTarget()
    assert opts.connection_type == poptorch.ConnectionType.Never
    rejects(AssertionError, "Never", on_device, torch.relu, torch.zeros(1), opts=opts)
    opts, strategies = Options().replicationFactor(4), poptorch.MeanReductionStrategy
    assert repr(opts).startswith("Options(replication_factor=4, ")
    assert "Training=_TrainingOptions(gradient_accumulation=1, " in repr(opts)
    assert repr(opts) != repr(Options()) == repr(Options())
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert opts.TensorLocations.location_optimizer == {"onChip": 0}
    assert poptorch.TensorLocationSettings().useOnChipStorage(True).useOnChipStorage(None).toDict() == {}
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Post
    training = wrapped(torch.nn.Linear(2, 2), opts, accum_type=torch.half)
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Running
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Post


def test_deprecated_options_warn_and_enums_of_popart_are_integers_and_options(caplog):
    Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
    assert "[Deprecated] Do not call options.Precision.halfFloatCasting()" in caplog.text
    names = {
        popart.SyntheticDataMode.RandomNormal: 2,
        popart.RecomputationType.Pipeline: 3,
        popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized: 3,
        popart.SubgraphCopyingStrategy.JustInTime: 1,
    }
    assert [int(name) for name in names] == list(names.values())
    Options()._Popart.set("autoRecomputation", int(popart.RecomputationType.Pipeline))
    Options()._Popart.set("syntheticDataMode", popart.SyntheticDataMode.Zeros)


Group = poptorch.CommGroupType
NOT_BOOL = (("yes",), (1,))
LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)
NOT_LOCATION = (({"onChip": True},), (None,))
MEAN_STRATEGY = "Training.setMeanAccumulationAndReplicationReductionStrategy"
# setter: (valid arguments, invalid arguments)
TABLE: Dict[str, Tuple[Tuple[Any, ...], Tuple[Tuple[Any, ...], ...]]] = {
    "anchorTensor": (("short", "long"), ((1, "long"), ("short", "long", poptorch.OutputMode.EveryN, 0))),
    "appendToLocationExcludes": (("torch",), ((1,),)),
    "autoRoundNumIPUs": ((True,), NOT_BOOL),
    "broadcastBuffers": ((False,), NOT_BOOL),
    "connectionType": ((poptorch.ConnectionType.OnDemand,), (("Never",), (2,))),
    "deviceIterations": ((4,), ((0,), ("4",), (4.0,), (True,), (np.int64(4),))),
    "disableModuleNamescope": ((), ()),
    "enableExecutableCaching": (("/cache",), ((1,),)),
    "enableProfiling": (("/profile",), ((1,),)),
    "enableStableNorm": ((True,), ()),
    "enableSyntheticData": ((True,), ()),
    "from_json": (('{"deviceIterations": 3}',), ()),
    "inputReplicaGrouping": ((1, Group.Orthogonal), ((0, Group.Consecutive), (1, 1))),
    "logCycleCount": ((True,), ()),
    "logDir": (("/logs",), ((1,),)),
    "maxRepeatLogs": ((8,), ((-1,), ("8",))),
    "modelName": (("resnet",), ((1,),)),
    "outputMode": ((poptorch.OutputMode.Sum,), (("Sum",), (2,), (poptorch.ReductionType.Sum,))),
    "randomSeed": ((7,), ((7.5,), ("7",))),
    "relaxOptimizerAttributesChecks": ((True,), ()),
    "replicationFactor": ((2,), ((0,), (None,))),
    "setAvailableMemoryProportion": (({"IPU0": 0.2},), (([0.2],), ({"IPU0": "0.2"},), ({0: 0.2},))),
    "setExecutionStrategy": ((poptorch.ShardedExecution(),), (("sharded",),)),
    "showCompilationProgressBar": ((False,), ()),
    "sourceLocationExcludes": ((["torch"],), (("torch",),)),
    "syncPattern": ((poptorch.SyncPattern.SinglePipeline,), (("Full",), (0,))),
    "updatableNamedBuffers": ((["mean"],), (("mean",), (5,))),
    "useIpuId": ((1,), ((-1,), ("1",))),
    "useIpuModel": ((True,), ()),
    "useOfflineIpuTarget": ((2,), (("mk2",),)),
    "Training.gradientAccumulation": ((4,), ((0,), ("4",))),
    "Training.accumulationAndReplicationReductionType": ((poptorch.ReductionType.Sum,), ()),
    MEAN_STRATEGY: ((poptorch.MeanReductionStrategy.Running,), (("Running",), (0,))),
    "Training.setAutomaticLossScaling": ((True,), ()),
    "Training.setConvolutionDithering": ((True,), ()),
    "Precision.enableFloatingPointExceptions": ((True,), NOT_BOOL),
    "Precision.enableStochasticRounding": ((True,), ()),
    "Precision.setPartialsType": ((torch.half,), ()),
    "Precision.halfFloatCasting": ((poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat,), ()),
    "Precision.runningStatisticsAlwaysFloat": ((False,), ()),
    "Distributed.configureProcessId": ((1, 2), (("1", 2), (0, 1.0))),
    "Distributed.setEnvVarNames": (("SOME_SIZE", "SOME_RANK"), ()),
    "Distributed.disable": ((), ()),
    "Jit.traceModel": ((False,), ()),
    "TensorLocations.numIOTiles": ((64,), ((31,), (33,), (256,), ("64",))),
    "TensorLocations.setActivationLocation": ((LOCATION,), NOT_LOCATION),
    "TensorLocations.setWeightLocation": ((LOCATION,), NOT_LOCATION),
    "TensorLocations.setOptimizerLocation": ((LOCATION,), NOT_LOCATION),
    "TensorLocations.setAccumulatorLocation": ((LOCATION,), NOT_LOCATION),
    "_Popart.set": (("enableOutlining", True), ()),
    "_Popart.setEngineOptions": (({"key": "value"},), ()),
    "_Popart.setPatterns": (({"PadSum": True},), (("PadSum",),)),
}
NOT_SETTERS = {"checkIsFrozen", "clone", "createOrSet", "defaultOutputMode", "deleteIfExists", "exists"}
NOT_SETTERS |= {"loadFromFile", "set", "toDict", "update"}
GROUPS = ("Training", "Precision", "Distributed", "Jit", "TensorLocations")
WARNS = ("Precision.halfFloatCasting", "Precision.runningStatisticsAlwaysFloat", "Jit.traceModel")


def public_methods(of: Any) -> Iterator[str]:
    names = {name for name, _ in inspect.getmembers(type(of), inspect.isfunction)}
    return (name for name in names - NOT_SETTERS if not name.startswith("_"))


def values_of(opts: poptorch.Options) -> Tuple[Any, ...]:
    own = ("relax_optimizer_checks", "show_compilation_progress_bar", "module_namescope_enabled")
    others = [getattr(opts, f"_{name}") for name in (*own, "source_location_excludes")]
    return (repr(opts), opts._execution_strategy._to_dict(), *others)


def changed_by(name: str, opts: poptorch.Options) -> Any:
    before = copy.deepcopy(values_of(opts))
    returned = operator.attrgetter(name)(opts)(*TABLE[name][0])
    return returned, before != values_of(opts)


def test_table_is_complete():
    opts = poptorch.Options()
    found = set(public_methods(opts))
    found |= {f"{group}.{name}" for group in GROUPS for name in public_methods(getattr(opts, group))}
    assert found == {name for name in TABLE if not name.startswith("_Popart")}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_setter_chains_and_validates(name, monkeypatch):
    monkeypatch.setenv("SOME_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # so that disable() changes something
    opts = poptorch.Options()
    group = getattr(opts, name.rpartition(".")[0]) if "." in name else opts
    returned, has_changed = changed_by(name, opts)
    assert returned is (None if name == "anchorTensor" else group)
    assert has_changed != (name in WARNS)
    for invalid in TABLE[name][1]:
        with pytest.raises(AssertionError):
            operator.attrgetter(name)(opts)(*invalid)


@pytest.mark.parametrize("name", sorted(set(TABLE) - set(WARNS)))
def test_setters_raise_error_when_frozen(name, monkeypatch):
    monkeypatch.setenv("SOME_SIZE", "3")
    opts = poptorch.Options()
    poptorch.inferenceModel(torch.nn.ReLU(), opts)
    before = values_of(opts)
    rejects(AttributeError, "Can't modify frozen Options", lambda: operator.attrgetter(name)(opts)(*TABLE[name][0]))
    assert values_of(opts) == before
    changed_by(name, opts.clone())


def test_an_option_has_its_type_can_be_assigned_and_pickled():
    opts = Options()
    opts.replication_factor = 4
    assert opts.outputMode(poptorch.OutputMode.All).toDict()["replication_factor"] == 4
    with pytest.raises(AssertionError, match="replication_factor"):
        opts.replication_factor = "2"
    with pytest.raises(AssertionError, match="no_such_option"):
        opts.no_such_option = 1
    rejects(AssertionError, "no_such_option", opts.set, no_such_option=1)
    assert not opts.exists("random_seed")
    opts.randomSeed(42)
    drawn = torch.rand(3)
    torch.manual_seed(42)
    assert opts.random_seed == 42
    assert torch.equal(drawn, torch.rand(3)), "the seed is also that of the host"
    opts = poptorch.Options().deviceIterations(4).randomSeed(3)
    opts.Training.gradientAccumulation(2)
    twin = pickle.loads(pickle.dumps(opts))
    assert repr(twin) == repr(opts)
    assert twin.deviceIterations(5).device_iterations == 5
