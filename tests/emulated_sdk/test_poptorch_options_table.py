"""Every public setter of the options in one table: valid arguments, invalid arguments, and whether it has an effect.

`EFFECT`: the emulation uses the value; `STORED`: the value is validated and stored only.
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

EFFECT, STORED = "has an effect", "stored"
NOT_BOOL = (("yes",), (1,))
LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)
NOT_LOCATION = (({"onChip": True},), (None,))

# setter: (valid arguments, invalid arguments, whether it has an effect)
TABLE: Dict[str, Tuple[Tuple[Any, ...], Tuple[Tuple[Any, ...], ...], str]] = {
    "anchorTensor": (("short", "long"), ((1, "long"), ("short", "long", poptorch.OutputMode.EveryN, 0)), EFFECT),
    "appendToLocationExcludes": (("torch",), ((1,),), STORED),
    "autoRoundNumIPUs": ((True,), NOT_BOOL, EFFECT),
    "broadcastBuffers": ((False,), NOT_BOOL, EFFECT),
    "connectionType": ((poptorch.ConnectionType.OnDemand,), (("Never",), (3,)), EFFECT),
    "deviceIterations": ((4,), ((0,), ("4",), (4.0,), (True,)), EFFECT),
    "disableModuleNamescope": ((), (), STORED),
    "enableExecutableCaching": (("/cache",), ((1,),), STORED),
    "enableProfiling": (("/profile",), ((1,),), STORED),
    "enableStableNorm": ((True,), (), STORED),
    "enableSyntheticData": ((True,), (), EFFECT),
    "from_json": (('{"deviceIterations": 3}',), (), EFFECT),
    "inputReplicaGrouping": (
        (1, poptorch.CommGroupType.Orthogonal),
        ((0, poptorch.CommGroupType.Consecutive),),
        EFFECT,
    ),
    "logCycleCount": ((True,), (), EFFECT),
    "logDir": (("/logs",), ((1,),), STORED),
    "maxRepeatLogs": ((8,), ((-1,), ("8",)), STORED),
    "modelName": (("resnet",), ((1,),), STORED),
    "outputMode": ((poptorch.OutputMode.Sum,), (("Sum",), (9,), (poptorch.ReductionType.Sum,)), EFFECT),
    "randomSeed": ((7,), ((7.5,), ("7",)), EFFECT),
    "relaxOptimizerAttributesChecks": ((True,), (), EFFECT),
    "replicationFactor": ((2,), ((0,), (None,)), EFFECT),
    "setAvailableMemoryProportion": (({"IPU0": 0.2},), (([0.2],), ({"IPU0": "0.2"},), ({0: 0.2},)), STORED),
    "setExecutionStrategy": ((poptorch.ShardedExecution(),), (("sharded",),), EFFECT),
    "showCompilationProgressBar": ((False,), (), EFFECT),
    "sourceLocationExcludes": ((["torch"],), (("torch",),), STORED),
    "syncPattern": ((poptorch.SyncPattern.SinglePipeline,), (("Full",),), STORED),
    "updatableNamedBuffers": ((["mean"],), (("mean",), (5,)), EFFECT),
    "useIpuId": ((1,), ((-1,), ("1",)), STORED),
    "useIpuModel": ((True,), (), STORED),
    "useOfflineIpuTarget": ((2,), (("mk2",),), EFFECT),
    "Training.gradientAccumulation": ((4,), ((0,), ("4",)), EFFECT),
    "Training.accumulationAndReplicationReductionType": ((poptorch.ReductionType.Sum,), (), EFFECT),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": (
        (poptorch.MeanReductionStrategy.Running,),
        (("Running",),),
        EFFECT,
    ),
    "Training.setAutomaticLossScaling": ((True,), (), EFFECT),
    "Training.setConvolutionDithering": ((True,), (), STORED),
    "Precision.enableFloatingPointExceptions": ((True,), NOT_BOOL, EFFECT),
    "Precision.enableStochasticRounding": ((True,), (), EFFECT),
    "Precision.setPartialsType": ((torch.half,), (), STORED),
    "Precision.halfFloatCasting": ((poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat,), (), STORED),
    "Precision.runningStatisticsAlwaysFloat": ((False,), (), STORED),
    "Distributed.configureProcessId": ((1, 2), (("1", 2), (0, 1.0)), EFFECT),
    "Distributed.setEnvVarNames": (("SOME_SIZE", "SOME_RANK"), (), EFFECT),
    "Distributed.disable": ((), (), EFFECT),
    "Jit.traceModel": ((False,), (), STORED),
    "TensorLocations.numIOTiles": ((64,), ((31,), (33,), (256,), ("64",)), EFFECT),
    "TensorLocations.setActivationLocation": ((LOCATION,), NOT_LOCATION, STORED),
    "TensorLocations.setWeightLocation": ((LOCATION,), NOT_LOCATION, STORED),
    "TensorLocations.setOptimizerLocation": ((LOCATION,), NOT_LOCATION, STORED),
    "TensorLocations.setAccumulatorLocation": ((LOCATION,), NOT_LOCATION, STORED),
    "_Popart.set": (("enableOutlining", True), (), STORED),
    "_Popart.setEngineOptions": (({"key": "value"},), (), STORED),
    "_Popart.setPatterns": (({"PadSum": True},), (("PadSum",),), STORED),
}
NOT_SETTERS = {
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
        if not name.startswith("_") and name not in NOT_SETTERS:
            yield name


def setter(opts: poptorch.Options, name: str) -> Any:
    group, _, method = name.rpartition(".")
    return getattr(getattr(opts, group) if group else opts, method)


def values_of(opts: poptorch.Options) -> Tuple[Any, ...]:
    own = ("relax_optimizer_checks", "show_compilation_progress_bar", "module_namescope_enabled")
    others = [getattr(opts, f"_{name}") for name in (*own, "source_location_excludes")]
    return (repr(opts), opts._execution_strategy._to_dict(), *others)


def changed_by(name: str, opts: poptorch.Options) -> Any:
    before = copy.deepcopy(values_of(opts))
    returned = setter(opts, name)(*TABLE[name][0])
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
    assert returned is group
    assert has_changed != (name in WARNS)
    for invalid in TABLE[name][1]:
        with pytest.raises(AssertionError):
            setter(opts, name)(*invalid)


@pytest.mark.parametrize("name", sorted(set(TABLE) - set(WARNS)))
def test_setters_raise_error_when_frozen(name, monkeypatch):
    monkeypatch.setenv("SOME_SIZE", "3")
    opts = poptorch.Options()
    poptorch.inferenceModel(torch.nn.ReLU(), opts)
    before = values_of(opts)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        setter(opts, name)(*TABLE[name][0])
    assert values_of(opts) == before
    assert changed_by(name, opts.clone())[0] is not None


def test_numpy_integers_are_accepted():
    opts = poptorch.Options().deviceIterations(np.int64(4)).randomSeed(np.int32(3))
    assert (type(opts.device_iterations), opts.random_seed) == (int, 3)


def test_options_can_be_pickled():
    opts = poptorch.Options().deviceIterations(4).randomSeed(1)
    opts.Training.gradientAccumulation(2)
    twin = pickle.loads(pickle.dumps(opts))
    assert repr(twin) == repr(opts)
    assert twin.deviceIterations(5).device_iterations == 5


def test_to_dict_has_the_replica_offset_of_the_process():
    opts = poptorch.Options().replicationFactor(2).outputMode(poptorch.OutputMode.All)
    assert "globalReplicationFactor" not in opts.toDict()
    opts.Distributed.configureProcessId(3, 4)
    values = opts.toDict()
    assert values["enableDistributedReplicatedGraphs"] is True
    assert (values["globalReplicationFactor"], values["globalReplicaOffset"]) == (8, 6)


def test_environment_variable_that_is_not_an_integer_raises_error(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK='first' is not an integer"):
        poptorch.Options()


def test_error_for_a_name_of_an_older_sdk_has_its_replacement():
    with pytest.raises(AttributeError, match="outputMode"):
        poptorch.Options().anchorMode(poptorch.OutputMode.All)
    with pytest.raises(AttributeError, match=r"SDK 3\.0 renamed it to poptorch\.OutputMode"):
        _ = poptorch.AnchorMode
    assert not hasattr(poptorch, "no_such_name")


def test_json_with_setters_enumeration_members_and_dtypes():
    opts = poptorch.Options().from_json(
        '{"Precision.setPartialsType": "torch.half", "outputMode": "poptorch.OutputMode.All",'
        ' "setAvailableMemoryProportion": {"IPU0": 0.1}, "sourceLocationExcludes": [["a", "b"]]}'
    )
    assert opts._Popart.options["partialsTypeMatMuls"] == "half"
    assert opts.output_mode == poptorch.OutputMode.All
    assert (opts.available_memory_proportion, opts._source_location_excludes) == ({0: 0.1}, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[1]", ValueError, "an object"),
        ("{", ValueError, "line 1"),
        ('{"noSuch": 1}', AttributeError, "noSuch"),
        ('{"device_iterations": 2}', AttributeError, "not a setter"),
        ('{"deviceIterations": "2"}', AssertionError, "device_iterations"),
    ],
)
def test_invalid_json_raises_error(text, error, message):
    with pytest.raises(error, match=message):
        poptorch.Options().from_json(text)


def test_file_may_use_all_names_of_the_package(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text(
        "setExecutionStrategy(poptorch.ShardedExecution())\n"
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
        "_Popart.set('hardwareInstrumentations', set([0, 1]))\n"
        "Precision.setPartialsType(torch.half)\n"
    )
    opts = poptorch.Options().loadFromFile(str(path))
    assert opts._Popart.options["hardwareInstrumentations"] == {0, 1}
    assert opts._Popart.options["convolutionOptions"] == {"partialsType": "half"}
