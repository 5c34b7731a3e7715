"""The cores of a host, divided between instances and replicas, and its usage, for fabricated hosts."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import List, NamedTuple, Sequence

import pytest

from raypod.system.cores import Core, cpus_of, divide, replica_cpus, usable_cores
from raypod.system.usage import HostMeter


def system(folder: Path, nodes: int, cores: int, threads: int) -> Path:
    """Write a host as Linux describes it: the CPUs of a node are consecutive, second hardware threads come last."""
    for node in range(nodes):
        first = [[node * cores + core + thread * nodes * cores for thread in range(threads)] for core in range(cores)]
        path = folder / "node" / f"node{node}" / "cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(",".join(str(cpu) for siblings in first for cpu in siblings) + "\n")
        for siblings in first:
            for cpu in siblings:
                topology = folder / "cpu" / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return folder


def parts(cores: Sequence[Core], instances: int) -> List[List[int]]:
    return [cpus_of(part) for part in divide(cores, instances)]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    return system(tmp_path, nodes=2, cores=16, threads=2)


def test_two_nodes_of_16_cores_with_two_hardware_threads(two_nodes: Path) -> None:
    cores = usable_cores(two_nodes, range(64))
    assert [core.node for core in cores] == [0] * 16 + [1] * 16
    assert (cores[1], parts(cores, 1)) == (Core(0, (1, 33)), [list(range(64))])
    assert parts(cores, 2) == [[*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    # Instances alternate between the nodes, and share no core.
    four = parts(cores, 4)
    assert four[:2] == [[*range(8), *range(32, 40)], [*range(16, 24), *range(48, 56)]]
    assert sorted(cpu for part in four for cpu in part) == list(range(64))
    assert parts(cores, 3) == [
        [*range(8), *range(32, 40)],
        [*range(16, 32), *range(48, 64)],
        [*range(8, 16), *range(40, 48)],
    ]
    shared = parts(cores, 64)  # more instances than cores
    assert all((len(part), shared.count(part)) == (2, 2) for part in shared)


def test_a_restricted_affinity(two_nodes: Path) -> None:
    cores = usable_cores(two_nodes, [0, 1, 2, 32, 33, 16])  # three cores of node 0, one without its second thread
    assert cores == [Core(0, (0, 32)), Core(0, (1, 33)), Core(0, (2,)), Core(1, (16,))]
    # One core in four is on node 1, and so is one instance in four.
    assert parts(cores, 4) == [[0, 32], [1, 33], [2], [16]]
    assert parts(cores, 2) == [[0, 32], [1, 2, 33]]
    assert parts(usable_cores(two_nodes, [5]), 3) == [[5], [5], [5]]


def test_one_core_and_an_undescribed_host(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path, [3])
    assert (cores, parts(cores, 1), parts(cores, 2)) == ([Core(0, (3,))], [[3]], [[3], [3]])
    assert replica_cpus(cores, 4, 2) == [[3]]
    assert usable_cores(tmp_path, [1, 0]) == [Core(0, (0,)), Core(0, (1,))]


def test_replicas_have_the_cores_of_their_threads(two_nodes: Path) -> None:
    cores = usable_cores(two_nodes, range(64))
    assert replica_cpus(cores, 2, 1) == [[*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    eight = replica_cpus(cores, 8, 4)
    assert [len(cpus) for cpus in eight] == [8] * 8
    assert sorted(cpu for cpus in eight for cpu in cpus) == list(range(64))
    # More replicas than cores compute on hardware threads, and not more at a time than their threads have CPUs.
    assert sorted(replica_cpus(cores, 100, 1)) == [[cpu] for cpu in range(64)]
    assert len(replica_cpus(cores, 100, 4)) == 16
    assert replica_cpus(cores, 3, 128) == [list(range(64))]


def test_this_host() -> None:
    cores = usable_cores()
    assert cpus_of(cores) == sorted(os.sched_getaffinity(0))


class CpuTimes(NamedTuple):
    """The fields of `psutil.cpu_times` on Linux, in s."""

    user: float
    nice: float = 0
    system: float = 0
    idle: float = 0
    iowait: float = 0
    irq: float = 0
    softirq: float = 0
    steal: float = 0
    guest: float = 5
    guest_nice: float = 5


def test_usage_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [10.0], [CpuTimes(user=100, idle=90, iowait=10)]
    interfaces = {"lo": SimpleNamespace(bytes_recv=900, bytes_sent=900)}
    interfaces["eth0"] = SimpleNamespace(bytes_recv=5, bytes_sent=7)
    interfaces["ib0"] = SimpleNamespace(bytes_recv=10, bytes_sent=20)
    monkeypatch.setattr("raypod.system.usage.time.monotonic", lambda: now[0])
    monkeypatch.setattr("psutil.cpu_times", lambda: times[0])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000, available=400))
    monkeypatch.setattr("psutil.net_io_counters", lambda **_: interfaces)
    meter = HostMeter(tmp_path)
    first = meter.measure()
    assert first is not None
    assert first.cpu_share is None
    assert (first.memory_used_bytes, first.memory_total_bytes) == (600, 1000)
    assert (first.network_received_bytes, first.network_sent_bytes) == (15, 27)
    assert 0 < first.disk_used_bytes <= first.disk_total_bytes
    times[0] = CpuTimes(user=130, idle=100, iowait=10)
    assert meter.measure() is first  # too soon
    now[0] += 1
    second = meter.measure()
    assert second is not None
    assert second.cpu_share == 0.75


def test_this_host_has_a_usage_but_none_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = HostMeter().measure()
    assert usage is not None
    assert 0 < usage.memory_used_bytes < usage.memory_total_bytes
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "none"))
    assert HostMeter(tmp_path).measure() is None
