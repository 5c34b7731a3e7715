"""Every public setter of the options, in one table: what it takes, what it refuses, whether it shows in results.

The table must be complete. `EFFECT`: something here depends on the value; `KEPT`: accepted, checked, kept and readable.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import poptorch
import pytest
import torch

EFFECT, KEPT = "has an effect", "kept"
NO_BOOL = (("yes",), (1,))
LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)
NO_LOCATION = (({"onChip": True},), (None,))

# setter: (arguments, arguments that are refused, whether it has an effect)
TABLE: Dict[str, Tuple[Tuple[Any, ...], Tuple[Tuple[Any, ...], ...], str]] = {
    "anchorTensor": (("short", "long"), ((1, "long"), ("short", "long", poptorch.OutputMode.EveryN, 0)), EFFECT),
    "appendToLocationExcludes": (("torch",), ((1,),), KEPT),
    "autoRoundNumIPUs": ((True,), NO_BOOL, EFFECT),
    "broadcastBuffers": ((False,), NO_BOOL, EFFECT),
    "connectionType": ((poptorch.ConnectionType.OnDemand,), (("Never",), (3,)), EFFECT),
    "deviceIterations": ((4,), ((0,), ("4",), (4.0,), (True,)), EFFECT),
    "disableModuleNamescope": ((), (), KEPT),
    "enableExecutableCaching": (("/cache",), ((1,),), KEPT),
    "enableProfiling": (("/profile",), ((1,),), KEPT),
    "enableStableNorm": ((True,), NO_BOOL, KEPT),
    "enableSyntheticData": ((True,), NO_BOOL, EFFECT),
    "from_json": (('{"deviceIterations": 3}',), (), EFFECT),
    "inputReplicaGrouping": (
        (2, poptorch.CommGroupType.Orthogonal),
        ((0, poptorch.CommGroupType.Consecutive),),
        EFFECT,
    ),
    "logCycleCount": ((True,), NO_BOOL, EFFECT),
    "logDir": (("/logs",), ((1,),), KEPT),
    "maxRepeatLogs": ((8,), ((-1,), ("8",)), KEPT),
    "modelName": (("resnet",), ((1,),), KEPT),
    "outputMode": ((poptorch.OutputMode.Sum,), (("Sum",), (9,), (poptorch.ReductionType.Sum,)), EFFECT),
    "randomSeed": ((7,), ((7.5,), ("7",)), EFFECT),
    "relaxOptimizerAttributesChecks": ((True,), NO_BOOL, EFFECT),
    "replicationFactor": ((2,), ((0,), (None,)), EFFECT),
    "setAvailableMemoryProportion": (({"IPU0": 0.2},), (([0.2],), ({"IPU0": "0.2"},), ({0: 0.2},)), KEPT),
    "setExecutionStrategy": ((poptorch.ShardedExecution(),), (("sharded",),), EFFECT),
    "showCompilationProgressBar": ((False,), NO_BOOL, EFFECT),
    "sourceLocationExcludes": ((["torch"],), (("torch",),), KEPT),
    "syncPattern": ((poptorch.SyncPattern.SinglePipeline,), (("Full",),), KEPT),
    "updatableNamedBuffers": ((["mean"],), (("mean",), (5,)), EFFECT),
    "useIpuId": ((1,), ((-1,), ("1",)), KEPT),
    "useIpuModel": ((True,), NO_BOOL, KEPT),
    "useOfflineIpuTarget": ((2,), (("mk2",),), EFFECT),
    "Training.gradientAccumulation": ((4,), ((0,), ("4",)), EFFECT),
    "Training.accumulationAndReplicationReductionType": ((poptorch.ReductionType.Sum,), (("Sum",),), EFFECT),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": (
        (poptorch.MeanReductionStrategy.Running,),
        (("Running",),),
        EFFECT,
    ),
    "Training.setAutomaticLossScaling": ((True,), NO_BOOL, EFFECT),
    "Training.setConvolutionDithering": ((True,), NO_BOOL, KEPT),
    "Precision.enableFloatingPointExceptions": ((True,), NO_BOOL, EFFECT),
    "Precision.enableStochasticRounding": ((True,), NO_BOOL, EFFECT),
    "Precision.setPartialsType": ((torch.half,), (), KEPT),
    "Precision.halfFloatCasting": ((poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat,), (), KEPT),
    "Precision.runningStatisticsAlwaysFloat": ((False,), (), KEPT),
    "Distributed.configureProcessId": ((1, 2), (("1", 2), (0, 1.0)), EFFECT),
    "Distributed.setEnvVarNames": (("SOME_SIZE", "SOME_RANK"), (), EFFECT),
    "Distributed.disable": ((), (), EFFECT),
    "Jit.traceModel": ((True,), NO_BOOL, KEPT),
    "TensorLocations.numIOTiles": ((64,), ((31,), (33,), (256,), ("64",)), EFFECT),
    "TensorLocations.setActivationLocation": ((LOCATION,), NO_LOCATION, KEPT),
    "TensorLocations.setWeightLocation": ((LOCATION,), NO_LOCATION, KEPT),
    "TensorLocations.setOptimizerLocation": ((LOCATION,), NO_LOCATION, KEPT),
    "TensorLocations.setAccumulatorLocation": ((LOCATION,), NO_LOCATION, KEPT),
    "_Popart.set": (("key", "value"), (("key",), (1, "value")), KEPT),
    "_Popart.setEngineOptions": (({"key": "value"},), (("key",),), KEPT),
    "_Popart.setPatterns": (({"PadSum": True},), (("PadSum",),), KEPT),
}
NO_SETTERS = {
    "checkIsFrozen",
    "clone",
    "createOrSet",
    "defaultOutputMode",
    "deleteIfExists",
    "exists",
    "loadFromFile",
    "set",
    "toDict",
    "update",
}
GROUPS = ("Training", "Precision", "Distributed", "Jit", "TensorLocations")
WARNS = ("Precision.halfFloatCasting", "Precision.runningStatisticsAlwaysFloat", "Jit.traceModel")


def public_methods(of: Any) -> Iterator[str]:
    for name, _ in inspect.getmembers(type(of), inspect.isfunction):
        if not name.startswith("_") and name not in NO_SETTERS:
            yield name


def setter(opts: poptorch.Options, name: str) -> Any:
    group, _, method = name.rpartition(".")
    return getattr(getattr(opts, group) if group else opts, method)


def changed_by(name: str, opts: poptorch.Options) -> Any:
    before = copy.deepcopy((opts.toDict(), opts._Popart.options, opts.Distributed.numProcesses))
    arguments = TABLE[name][0]
    if name in WARNS:
        with pytest.warns(DeprecationWarning, match="has no effect"):
            returned = setter(opts, name)(*arguments)
    else:
        returned = setter(opts, name)(*arguments)
    return returned, before != (opts.toDict(), opts._Popart.options, opts.Distributed.numProcesses)


def test_the_table_is_complete():
    opts = poptorch.Options()
    found = set(public_methods(opts))
    found |= {f"{group}.{name}" for group in GROUPS for name in public_methods(getattr(opts, group))}
    assert found == {name for name in TABLE if not name.startswith("_Popart")}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_setter_chains_changes_values_and_refuses_others(name, monkeypatch):
    monkeypatch.setenv("SOME_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # so that disable() changes something
    opts = poptorch.Options()
    group = getattr(opts, name.rpartition(".")[0]) if "." in name else opts
    returned, has_changed = changed_by(name, opts)
    assert returned is group
    assert has_changed
    for refused in TABLE[name][1]:
        with pytest.raises(AssertionError):
            setter(opts, name)(*refused)


@pytest.mark.parametrize("name", sorted(set(TABLE) - set(WARNS)))
def test_no_setter_changes_frozen_options(name, monkeypatch):
    monkeypatch.setenv("SOME_SIZE", "3")
    opts = poptorch.Options()
    poptorch.inferenceModel(torch.nn.ReLU(), opts)
    before = opts.toDict()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        setter(opts, name)(*TABLE[name][0])
    assert opts.toDict() == before
    assert changed_by(name, opts.clone())[0] is not None


def test_whole_numbers_of_numpy_are_numbers():
    opts = poptorch.Options().deviceIterations(np.int64(4)).randomSeed(np.int32(3))
    assert (type(opts.device_iterations), opts.random_seed) == (int, 3)


def test_options_survive_pickling_and_a_frozen_clone_is_free():
    opts = poptorch.Options().deviceIterations(4).randomSeed(1)
    opts.Training.gradientAccumulation(2)
    twin = pickle.loads(pickle.dumps(opts))
    assert twin.toDict() == opts.toDict()
    assert twin.deviceIterations(5).device_iterations == 5


def test_a_distributed_run_knows_its_place_among_all_replicas():
    opts = poptorch.Options().replicationFactor(2)
    assert "globalReplicationFactor" not in opts.toDict()
    opts.Distributed.configureProcessId(3, 4)
    values = opts.toDict()
    assert values["enableDistributedReplicatedGraphs"] is True
    assert (values["globalReplicationFactor"], values["globalReplicaOffset"]) == (8, 6)


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK is 'first'"):
        poptorch.Options()


def test_names_of_older_sdks_say_what_took_their_place():
    with pytest.raises(AttributeError, match="outputMode"):
        poptorch.Options().anchorMode(poptorch.OutputMode.All)
    with pytest.raises(AttributeError, match=r"poptorch\.OutputMode since SDK 3\.0"):
        _ = poptorch.AnchorMode
    assert not hasattr(poptorch, "no_such_name")


def test_json_names_setters_members_and_dtypes():
    opts = poptorch.Options().from_json(
        '{"Precision.setPartialsType": "torch.half", "outputMode": "poptorch.OutputMode.All",'
        ' "setAvailableMemoryProportion": {"IPU0": 0.1}, "sourceLocationExcludes": [["a", "b"]]}'
    )
    assert opts.Precision.partials_type == torch.half
    assert opts.output_mode == poptorch.OutputMode.All
    assert (opts.available_memory_proportion, opts.source_location_excludes) == ({"IPU0": 0.1}, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[1]", ValueError, "an object"),
        ("{", ValueError, "line 1"),
        ('{"noSuch": 1}', AttributeError, "noSuch"),
        ('{"device_iterations": 2}', AttributeError, "name its setter"),
        ('{"deviceIterations": "2"}', AssertionError, "device_iterations"),
    ],
)
def test_bad_json_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        poptorch.Options().from_json(text)


def test_a_file_may_name_everything_of_the_package(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text(
        "setExecutionStrategy(poptorch.ShardedExecution())\n"
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
        "_Popart.set('hardwareInstrumentations', set([0, 1]))\n"
        "Precision.setPartialsType(torch.half)\n"
    )
    opts = poptorch.Options().loadFromFile(str(path))
    assert opts._Popart.options == {"hardwareInstrumentations": {0, 1}}
    assert opts.Precision.partials_type == torch.half
