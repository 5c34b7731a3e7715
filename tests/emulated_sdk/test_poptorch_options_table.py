"""Every public setter of the options in one table: valid and invalid arguments."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import poptorch
import pytest
import torch

NOT_BOOL = (("yes",), (1,))
LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)
NOT_LOCATION = (({"onChip": True},), (None,))

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
    "inputReplicaGrouping": (
        (1, poptorch.CommGroupType.Orthogonal),
        ((0, poptorch.CommGroupType.Consecutive), (1, 1)),
    ),
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
    "Training.setMeanAccumulationAndReplicationReductionStrategy": (
        (poptorch.MeanReductionStrategy.Running,),
        (("Running",), (0,)),
    ),
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
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        operator.attrgetter(name)(opts)(*TABLE[name][0])
    assert values_of(opts) == before
    changed_by(name, opts.clone())


def test_options_can_be_pickled():
    opts = poptorch.Options().deviceIterations(4).randomSeed(3)
    opts.Training.gradientAccumulation(2)
    twin = pickle.loads(pickle.dumps(opts))
    assert repr(twin) == repr(opts)
    assert twin.deviceIterations(5).device_iterations == 5
