"""`popdist`: the position of an instance from its environment, its options, and the calls between instances."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, Dict, List

import popdist
import popdist.poptorch
import poptorch
import pytest

NAMES = [
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_NUM_IPUS_PER_REPLICA",
    "POPDIST_LOCAL_INSTANCE_INDEX",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE",
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


def test_the_defaults_are_one_instance_of_one_replica(environment: pytest.MonkeyPatch) -> None:
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (1, 0, 0)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (1, 1, 0)
    assert popdist.getNumIpusPerReplica() == 1
    assert popdist.checkNumIpusPerReplica(1)
    assert popdist.getDeviceId() == 0


@pytest.mark.parametrize(("offset", "index"), [(0, 0), (2, 1), (4, 2), (6, 3)])
def test_index_and_count_are_derived_from_the_replicas(
    environment: pytest.MonkeyPatch, offset: int, index: int
) -> None:
    set_all(environment, instance(8, 2, offset, 2, index % 2))
    assert popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (4, index)
    assert popdist.getLocalInstanceIndex() == index % 2
    assert popdist.getReplicaIndexOffset() == offset
    assert popdist.checkNumIpusPerReplica(2)
    assert not popdist.checkNumIpusPerReplica(1)
    assert popdist.getDeviceId() == 24 + index  # known device ids of PopDist


@pytest.mark.parametrize(
    ("total", "local", "offset", "ipus", "device"),
    [(16, 1, 5, 1, 5), (16, 16, 0, 1, 30), (4, 1, 3, 1, 3), (3, 1, 2, 1, 2)],
)
def test_device_ids(
    environment: pytest.MonkeyPatch, total: int, local: int, offset: int, ipus: int, device: int
) -> None:
    set_all(environment, instance(total, local, offset, ipus))
    assert popdist.getDeviceId() == device


def test_device_id_for_other_ipus_per_replica(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(8, 2, 2, 1))
    assert popdist.getDeviceId(2) == 25
    with pytest.raises(RuntimeError, match="6 IPUs has no device"):
        popdist.getDeviceId(3)


def test_the_environment_is_read_at_every_call(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 0))
    assert popdist.getInstanceIndex() == 0
    environment.setenv("POPDIST_REPLICA_INDEX_OFFSET", "2")
    assert popdist.getInstanceIndex() == 1


@pytest.mark.parametrize("function", [popdist.getNumInstances, popdist.getInstanceIndex, popdist.getDeviceId])
def test_non_uniform_replicas_have_no_instance_index(environment: pytest.MonkeyPatch, function: Any) -> None:
    set_all(environment, {**instance(5, 3, 2), "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "0"})
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (5, 3, 2)
    with pytest.raises(RuntimeError, match="POPDIST_UNIFORM_REPLICAS_PER_INSTANCE=0"):
        function()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["two", "", "-1", "1.5"])
def test_an_invalid_variable_is_named(environment: pytest.MonkeyPatch, name: str, text: str) -> None:
    set_all(environment, {**instance(4, 2, 2), name: text})
    with pytest.raises(RuntimeError, match=f"{name}='{text}'"):
        [popdist.getDeviceId(), popdist.getLocalInstanceIndex()]


@pytest.mark.parametrize("name", ["POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET"])
def test_a_missing_variable_is_named(environment: pytest.MonkeyPatch, name: str) -> None:
    set_all(environment, instance(4, 2, 2))
    environment.delenv(name)
    with pytest.raises(RuntimeError, match=f"{name} is not set, although POPDIST_NUM_TOTAL_REPLICAS=4 is"):
        popdist.getInstanceIndex()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (instance(2, 4, 0), "POPDIST_NUM_LOCAL_REPLICAS=4 is more than"),
        (instance(4, 2, 3), "exceeds POPDIST_NUM_TOTAL_REPLICAS=4"),
        (instance(6, 2, 1), "POPDIST_REPLICA_INDEX_OFFSET=1 is not a multiple"),
        (instance(5, 2, 2), "POPDIST_NUM_TOTAL_REPLICAS=5 is not a multiple"),
    ],
)
def test_inconsistent_variables_are_an_error(
    environment: pytest.MonkeyPatch, variables: Dict[str, str], message: str
) -> None:
    set_all(environment, variables)
    with pytest.raises(RuntimeError, match=message):
        [popdist.getInstanceIndex(), popdist.getNumInstances()]


def test_options_are_set_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(8, 2, 4))
    options = popdist.poptorch.Options()
    assert isinstance(options, poptorch.Options)
    assert options.replication_factor == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (2, 4)


def test_options_default_to_one_process(environment: pytest.MonkeyPatch) -> None:
    options = popdist.poptorch.Options()
    assert options.replication_factor == 1
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_popdist_takes_precedence_over_mpi_in_options(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, {**instance(4, 2, 2), "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"})
    distributed = popdist.poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (1, 2)


def test_to_dict_selects_the_device(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(8, 2, 4, 2))
    options = popdist.poptorch.Options().outputMode(poptorch.OutputMode.All)
    assert not options.exists("ipu_id")
    values = options.toDict()
    assert (values["ipu_id"], values["replication_factor"]) == (26, 2)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("useIpuId", (0,)),
        ("replicationFactor", (2,)),
        ("Distributed.disable", ()),
        ("Distributed.setEnvVarNames", ("A", "B")),
        ("Distributed.configureProcessId", (0, 1)),
    ],
)
def test_options_that_the_launcher_decides_cannot_be_set(
    environment: pytest.MonkeyPatch, call: str, arguments: Any
) -> None:
    target: Any = popdist.poptorch.Options()
    for name in call.split("."):
        target = getattr(target, name)
    with pytest.raises(RuntimeError, match=f"^Cannot call `{call}` with popdist.poptorch.Options$"):
        target(*arguments)


def test_a_clone_keeps_values_and_restrictions(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 2))
    clone = popdist.poptorch.Options().deviceIterations(3).clone()
    assert (clone.device_iterations, clone.replication_factor, clone.Distributed.processId) == (3, 2, 1)
    with pytest.raises(RuntimeError, match="Cannot call"):
        clone.replicationFactor(1)


@pytest.mark.parametrize("given", [1, 2])
def test_ipus_per_replica_by_default_or_as_set_all(environment: pytest.MonkeyPatch, given: int) -> None:
    set_all(environment, instance(4, 2, 2, 2))
    assert popdist.poptorch.Options(ipus_per_replica=given).replication_factor == 2


def test_ipus_per_replica_other_than_launched_are_an_error(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 2, 2))
    with pytest.raises(RuntimeError, match=r"ipus_per_replica=4\), but the run was launched with 2"):
        popdist.poptorch.Options(ipus_per_replica=4)


def test_without_a_launcher_a_replica_may_have_any_number_of_ipus(environment: pytest.MonkeyPatch) -> None:
    assert popdist.poptorch.Options(ipus_per_replica=4).replication_factor == 1


def test_one_instance_needs_no_rendezvous(environment: pytest.MonkeyPatch) -> None:
    assert not popdist.isBackendInitialized()
    popdist.synchronize()
    popdist.init()
    popdist.init()
    assert popdist.isBackendInitialized()
    popdist.synchronize()
    popdist.finalizeBackend()
    assert not popdist.isBackendInitialized()
    popdist.finalizeBackend()
    with pytest.raises(RuntimeError, match="MPI can be initialized only once in a process"):
        popdist.init()


def test_synchronize_needs_init(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 2))
    with pytest.raises(RuntimeError, match=r"call popdist.init\(\)"):
        popdist.synchronize()


def test_execute_on_instances_runs_on_those_only(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, instance(4, 2, 2))
    assert popdist.execute_on_instances({1, 2}, divmod, 7, 2) == (3, 1)
    assert popdist.execute_on_instances({1}, int, "11", base=2) == 3
    assert popdist.execute_on_instances({0}, divmod, 7, 0) is None


@pytest.mark.parametrize("instances", [0, None, {"0"}])
def test_instances_must_be_a_set_of_indices(environment: pytest.MonkeyPatch, instances: Any) -> None:
    with pytest.raises(TypeError, match="must be a set of instance indices"):
        popdist.execute_on_instances(instances, print)


def test_func_must_be_callable(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="`func` must be callable, got 3"):
        popdist.execute_on_instances({0}, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("frontend", ["popart", "tensorflow"])
def test_other_frontends_raise_import_error(frontend: str) -> None:
    with pytest.raises(ImportError, match=f"popdist.{frontend} needs .* PopTorch programs only"):
        importlib.import_module(f"popdist.{frontend}")


# ---- several instances


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


@pytest.fixture(scope="module")
def values(ranks: Any) -> Dict[str, List[Any]]:
    """Return the values of two instances; starting them takes seconds."""
    return ranks(__file__, ["synchronize", "run_on_the_last"], 2)


def test_a_function_is_executed_on_the_given_instances(values: Dict[str, List[Any]]) -> None:
    assert values["run_on_the_last"] == [False, True]


def test_synchronize_waits_for_the_last_instance(values: Dict[str, List[Any]]) -> None:
    (first, first_s), (second, second_s) = values["synchronize"]
    assert (first, second) == (0, 1)
    assert first_s > 0.3 > second_s
