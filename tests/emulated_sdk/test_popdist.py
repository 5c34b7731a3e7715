"""`popdist`: the position of an instance from its environment, its options, and the calls between instances."""

from __future__ import annotations

import importlib
import operator
import os
import time
from typing import Any, Dict, List

import popdist
import popdist.poptorch
import poptorch
import pytest

from tests.support.refused import rejects

NAMES = [
    *("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET"),
    *("POPDIST_NUM_IPUS_PER_REPLICA", "POPDIST_LOCAL_INSTANCE_INDEX", "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"),
]


def instance(total: int, local: int, offset: int, ipus: int = 1, local_index: int = 0) -> Dict[str, str]:
    return dict(zip(NAMES, map(str, (total, local, offset, ipus, local_index, 1))))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*NAMES, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(popdist, "_is_finalized", False)  # of this process, in which other tests run too
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, variables: Dict[str, str]) -> None:
    for name, text in variables.items():
        environment.setenv(name, text)


def test_index_and_count_are_derived_from_the_replicas_in_the_environment_at_every_call(environment: Any) -> None:
    for index in range(4):
        set_all(environment, instance(8, 2, 2 * index, 2, index % 2))
        assert popdist.isPopdistEnvSet()
        assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (4, index)
        assert (popdist.getLocalInstanceIndex(), popdist.getReplicaIndexOffset()) == (index % 2, 2 * index)
        assert popdist.checkNumIpusPerReplica(2)
        assert not popdist.checkNumIpusPerReplica(1)
        assert popdist.getDeviceId() == 24 + index  # known device ids of PopDist


def test_device_ids(environment: pytest.MonkeyPatch) -> None:
    for place, device in (((16, 1, 5), 5), ((16, 16, 0), 30), ((4, 1, 3), 3), ((3, 1, 2), 2)):
        set_all(environment, instance(*place))
        assert popdist.getDeviceId() == device
    set_all(environment, instance(8, 2, 2))
    assert popdist.getDeviceId(2) == 25
    rejects(RuntimeError, "6 IPUs has no device", popdist.getDeviceId, 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["two", "", "-1", "1.5"])
def test_an_invalid_variable_is_named(environment: pytest.MonkeyPatch, name: str, text: str) -> None:
    set_all(environment, {**instance(4, 2, 2), name: text})
    rejects(RuntimeError, f"{name}='{text}'", lambda: [popdist.getDeviceId(), popdist.getLocalInstanceIndex()])


def test_non_uniform_replicas_have_no_instance_index_and_a_missing_variable_is_named(environment: Any) -> None:
    set_all(environment, {**instance(5, 3, 2), "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "0"})
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (5, 3, 2)
    for function in (popdist.getNumInstances, popdist.getInstanceIndex, popdist.getDeviceId):
        rejects(RuntimeError, "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=0", function)
    for name in ("POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET"):
        set_all(environment, instance(4, 2, 2))
        environment.delenv(name)
        message = f"{name} is not set, although POPDIST_NUM_TOTAL_REPLICAS=4 is"
        rejects(RuntimeError, message, popdist.getInstanceIndex)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (instance(2, 4, 0), "POPDIST_NUM_LOCAL_REPLICAS=4 is more than"),
        (instance(4, 2, 3), "exceeds POPDIST_NUM_TOTAL_REPLICAS=4"),
        (instance(6, 2, 1), "POPDIST_REPLICA_INDEX_OFFSET=1 is not a multiple"),
        (instance(5, 2, 2), "POPDIST_NUM_TOTAL_REPLICAS=5 is not a multiple"),
    ],
)
def test_inconsistent_variables_are_an_error(environment: Any, variables: Dict[str, str], message: str) -> None:
    set_all(environment, variables)
    rejects(RuntimeError, message, lambda: [popdist.getInstanceIndex(), popdist.getNumInstances()])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 0, 1)),
        (instance(8, 2, 4), (2, 2, 4)),
        ({**instance(4, 2, 2), "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"}, (2, 1, 2)),
    ],
)
def test_options_are_set_from_the_environment_of_popdist(environment: Any, variables: Any, expected: Any) -> None:
    set_all(environment, variables)
    options = popdist.poptorch.Options()
    assert isinstance(options, poptorch.Options)
    assert (options.replication_factor, options.Distributed.processId, options.Distributed.numProcesses) == expected


def test_options_that_the_launcher_decides_cannot_be_set_also_in_a_clone(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(8, 2, 4, 2))
    options = popdist.poptorch.Options().outputMode(poptorch.OutputMode.All)
    assert not options.exists("ipu_id")
    assert (options.toDict()["ipu_id"], options.toDict()["replication_factor"]) == (26, 2)
    clone = options.deviceIterations(3).clone()
    assert (clone.device_iterations, clone.replication_factor, clone.Distributed.processId) == (3, 2, 2)
    of_distributed = {"disable": (), "setEnvVarNames": ("A", "B"), "configureProcessId": (0, 1)}
    calls = {"useIpuId": (0,), "replicationFactor": (2,), **{f"Distributed.{n}": a for n, a in of_distributed.items()}}
    for each in (options, clone):
        for call, arguments in calls.items():
            message = f"^Cannot call `{call}` with popdist.poptorch.Options$"
            rejects(RuntimeError, message, operator.attrgetter(call)(each), *arguments)


def test_the_defaults_are_one_instance_of_one_replica_which_needs_no_rendezvous(
    environment: pytest.MonkeyPatch,
) -> None:
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (1, 0, 0)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (1, 1, 0)
    assert popdist.getNumIpusPerReplica() == 1
    assert popdist.checkNumIpusPerReplica(1)
    assert popdist.getDeviceId() == 0
    assert not popdist.isBackendInitialized()
    popdist.synchronize()
    popdist.init()
    popdist.init()
    assert popdist.isBackendInitialized()
    popdist.synchronize()
    popdist.finalizeBackend()
    assert not popdist.isBackendInitialized()
    popdist.finalizeBackend()
    rejects(RuntimeError, "MPI can be initialized only once in a process", popdist.init)


def test_synchronize_needs_init_and_execute_on_instances_runs_on_those_only(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 2))
    rejects(RuntimeError, r"call popdist.init\(\)", popdist.synchronize)
    assert popdist.execute_on_instances({1, 2}, divmod, 7, 2) == (3, 1)
    assert popdist.execute_on_instances({1}, int, "11", base=2) == 3
    assert popdist.execute_on_instances({0}, divmod, 7, 0) is None
    for instances in (0, None, {"0"}):
        rejects(TypeError, "must be a set of instance indices", popdist.execute_on_instances, instances, print)
    with pytest.raises(TypeError, match="`func` must be callable, got 3"):
        popdist.execute_on_instances({0}, 3)  # type: ignore[arg-type]


def test_ipus_per_replica_are_those_of_the_launcher_if_there_is_one(environment: pytest.MonkeyPatch) -> None:
    assert popdist.poptorch.Options(ipus_per_replica=4).replication_factor == 1
    set_all(environment, instance(4, 2, 2, 2))
    for given in (1, 2):
        assert popdist.poptorch.Options(ipus_per_replica=given).replication_factor == 2
    other = r"ipus_per_replica=4\), but the run was launched with 2"
    rejects(RuntimeError, other, popdist.poptorch.Options, ipus_per_replica=4)


def test_other_frontends_raise_import_error() -> None:
    for name in ("popdist.popart", "popdist.tensorflow"):
        rejects(ImportError, f"{name} needs .* PopTorch programs only", importlib.import_module, name)


def synchronize(rank: int, size: int) -> List[float]:
    os.environ.update(instance(2 * size, 2, 2 * rank))
    popdist.init()
    time.sleep(0.5 * rank)
    began = time.monotonic()
    popdist.synchronize()
    waited_s = time.monotonic() - began
    popdist.finalizeBackend()
    return [popdist.getInstanceIndex(), waited_s]


def run_on_the_last(rank: int, size: int) -> Any:
    os.environ.update(instance(2 * size, 2, 2 * rank))
    return popdist.execute_on_instances({size - 1}, os.getpid) == os.getpid()


def test_functions_run_on_the_given_instances_and_synchronize_waits_for_the_last(ranks: Any) -> None:
    values = ranks(__file__, ["synchronize", "run_on_the_last"], 2)
    assert values["run_on_the_last"] == [False, True]
    (first, first_s), (second, second_s) = values["synchronize"]
    assert (first, second) == (0, 1)
    assert first_s > 0.3 > second_s
