"""The Ray nodes of hosts: missing ones, names, drained ones, room for replicas; the cluster file."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Set

import pytest
import yaml

from raypod.__main__ import main
from raypod.errors import ClusterError
from raypod.plan.cluster import Cluster, Host, cluster_of, read_cluster
from raypod.plan.elastic import Room
from raypod.plan.placement import Placement, Sizes, place
from raypod.plan.plan import DatasetSize, Plan, TaskFacts, make_plan
from raypod.plan.resolve import from_values
from raypod.runtime.workers import ray_cluster_file, ray_nodes, ray_reservation
from raypod.runtime.workers.ray import RayFleet
from raypod.runtime.workers.ray_cluster_file import cluster_of_nodes
from raypod.runtime.workers.ray_nodes import draining_hosts, draining_nodes, match_hosts, peers_of, wait_for_nodes
from raypod.runtime.workers.ray_reservation import HostRoom
from tests.support.scripted_ray import NEVER, RayError, Ref, ScriptedRay, node


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch, *map(node, "abc"))


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> Set[str]:
    found: Set[str] = set()
    monkeypatch.setattr(ray_reservation, "draining_nodes", lambda: found)
    monkeypatch.setattr(ray_nodes, "draining_nodes", lambda: found)
    monkeypatch.setattr(ray_reservation, "node_affinity", lambda node: {"node": node["NodeID"]})
    return found


def placed(hosts: str, replicas: int = 2) -> Placement:
    return place(cluster_of(hosts), Sizes(replicas, 2, 1))


def test_the_wait_for_hosts_ends_if_the_gcs_does_not_answer(ray: ScriptedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(ray, "nodes", answer.wait)
    monkeypatch.setattr(ray_nodes, "_ANSWER_S", 0.05)
    with pytest.raises(ClusterError, match="Ray's GCS has not answered this process for 0.05 s"):
        wait_for_nodes(ray, placed("a,b"), 10, print)
    answer.set()


def test_localhost_is_this_node_and_two_names_of_one_host_are_rejected(ray: ScriptedRay) -> None:
    assert [each["NodeID"] for each in match_hosts(ray, placed("b,localhost"))] == ["b", "a"]
    for other in ("host-a", "localhost"):
        with pytest.raises(ClusterError, match=f"a, {other} are names of one host; list it once"):
            match_hosts(ray, placed(f"a,{other}"))


@pytest.mark.parametrize(
    ("ipus", "replicas", "message"),
    [
        ({"a": 4.0, "b": 4.0}, 8, None),
        ({}, 8, None),  # the hosts of an emulated pod have none
        ({"a": 4.0}, 2, r"host b has 0 IPUs and the plan puts 1 on it \(the pod has 4 in all, the plan needs 2\)"),
        ({"a": 1.0, "b": 4.0}, 8, "host a has 1 IPU and the plan puts 4 on it"),
    ],
)
def test_a_host_with_too_few_ipus_is_named(ray: ScriptedRay, ipus: Any, replicas: int, message: Any) -> None:
    ray.found_nodes = [node(name, Resources={"IPU": ipus[name]} if name in ipus else {}) for name in "ab"]
    if message is None:
        assert len(match_hosts(ray, placed("a,b", replicas))) == 2
    else:
        with pytest.raises(ClusterError, match=message):
            match_hosts(ray, placed("a,b", replicas))


def test_a_missing_host_is_waited_for_and_named(ray: ScriptedRay) -> None:
    lines: List[str] = []
    ray.found_nodes[1] = node("b", Alive=False)

    def join_later(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            ray.found_nodes[1] = node("b")

    began_s = ray.now_s
    found = wait_for_nodes(ray, placed("a,b"), 30, join_later)
    assert [each["NodeID"] for each in found] == ["a", "b"]
    assert lines == ["waiting for b (30 s more, --wait-hosts)", "waiting for b (20 s more, --wait-hosts)"]
    assert 10 < ray.now_s - began_s < 12
    ray.found_nodes.pop()
    began_s = ray.now_s
    with pytest.raises(ClusterError, match=r"b,c: no Ray node is alive on c; alive: a, b$"):
        wait_for_nodes(ray, placed("b,c"), 3, lines.append)
    assert ray.now_s - began_s == 3
    with pytest.raises(ClusterError, match="no Ray node is alive on c"):
        wait_for_nodes(ray, placed("b,c"), 0, lines.append)


def test_the_hosts_that_ray_drains_are_left_by_instances_and_copies(ray: ScriptedRay, draining: Set[str]) -> None:
    cluster = Cluster("pod", tuple(Host(f"name-{each}", each) for each in ("c", "a", "host-a", "b", "host-b", "d")))
    fleet: Any = SimpleNamespace(_ray=ray, _full=SimpleNamespace(placement=SimpleNamespace(cluster=cluster)))
    assert RayFleet.peers(fleet) == ["name-b", "name-c"]  # from the one after this host on, each once
    draining.add("b")
    assert peers_of(ray, cluster) == ["name-c"]
    placement = place(Cluster("pod", (Host("first", "a"), Host("second", "b"))), Sizes(2, 2, 1))
    assert draining_hosts(placement, [node("a"), node("b"), node("b"), node("c")]) == ["second"]
    draining.add("c")
    assert draining_hosts(placement, [node("c")]) == ["c"]  # it is not in the file


@pytest.mark.parametrize("missing", ["module", "function"])
def test_no_private_api_of_ray(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str) -> None:
    def import_module(name: str) -> Any:
        assert name == "ray._private.state"
        if missing == "module":
            raise ImportError(f"no module named {name}")
        return SimpleNamespace(state=SimpleNamespace())

    ray_nodes._log_missing_api.cache_clear()
    monkeypatch.setattr(importlib, "import_module", import_module)
    with caplog.at_level(logging.WARNING):
        assert draining_nodes() == draining_nodes() == set()
    (record,) = caplog.records
    assert record.getMessage().startswith("this version of Ray does not report draining hosts: ")


# ---- room ------------------------------------------------------------------------------------------------------------


def plan_on(hosts: str, wait_hosts: float = 0, ipus_per_replica: int = 1) -> Plan:
    pod: Dict[str, Any] = {"replicas": 6, "num_instances": 3, "elastic": True, "wait_hosts": wait_hosts}
    training = {"gradient_accumulation": 3, "model": "tiny"}
    config = from_values({"pod": {**pod, "ipus_per_replica": ipus_per_replica}, "training": training})
    cluster = Cluster("pod", tuple(Host(name, name) for name in hosts.split(",")))
    return make_plan(config, cluster, TaskFacts(DatasetSize(100_000, 0)), "run")


def test_an_emulated_host_has_room_for_the_replicas_of_the_plan(ray: ScriptedRay, draining: Set[str]) -> None:
    room = HostRoom(ray, plan_on("a,b,c"), print)
    assert room.alive() == room.responsive() == [Room("a", 2), Room("b", 2), Room("c", 2)]
    draining.add("b")
    ray.found_nodes[2] = node("c", Alive=False)
    assert room.alive() == room.responsive() == [Room("a", 2)]
    assert [each.host for each in HostRoom(ray, plan_on("a,host-a,c"), print).alive()] == ["a"]  # two names count once


def test_ipus_limit_replicas_and_silent_and_dead_hosts_are_left_out(ray: ScriptedRay, draining: Set[str]) -> None:
    tasks = {"a": Ref(None, NEVER), "b": Ref(RayError("dead")), "c": Ref(None)}
    ray.start = lambda options: tasks[options["node"]]
    assert HostRoom(ray, plan_on("a,b,c"), print).responsive() == [Room("c", 2)]
    assert ray.cancelled == [tasks["a"]]
    ray.found_nodes = [node("a", Alive=False)]
    assert HostRoom(ray, plan_on("a,b,c"), print).responsive() == []
    ray.found_nodes = [node("a", Resources={"IPU": 8.0}), node("b", Resources={"IPU": 3.0}), node("c")]
    room = HostRoom(ray, plan_on("a,b,c", ipus_per_replica=2), print)
    assert room.alive() == [Room("a", 4), Room("b", 1), Room("c", 0)]


def test_a_wait_ends_with_enough_room_with_the_run_and_with_its_time(ray: ScriptedRay, draining: Set[str]) -> None:
    lines: List[str] = []
    ray.found_nodes = [node("a")]
    room, began_s = HostRoom(ray, plan_on("a,b,c", wait_hosts=60), lines.append), ray.now_s

    def is_enough(found: List[Room]) -> bool:
        if ray.now_s > began_s + 12:
            ray.found_nodes = [node("a"), node("b")]
        return len(found) == 2

    assert [each.host for each in room.wait(is_enough, lambda: False)] == ["a", "b"]
    assert (lines[0], len(lines)) == ("waiting for b, c (60 s more, --wait-hosts)", 2)
    assert len(room.wait(lambda found: False, lambda: True)) == 2
    began_s = ray.now_s
    assert len(room.wait(lambda found: False, lambda: False)) == 2
    assert 60 <= ray.now_s - began_s < 65
    assert len(HostRoom(ray, plan_on("a,b,c"), lines.append).wait(lambda found: False, lambda: False)) == 2


# ---- `raypod cluster-file` -------------------------------------------------------------------------------------------


HEAD = {"node:__internal_head__": 1.0}


def test_raypod_reads_its_cluster_file(tmp_path: Path) -> None:
    nodes = [node("10.0.0.2", Resources={"IPU": 16.0, **HEAD}), node("10.0.0.3", Resources={"IPU": 16.0})]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_of_nodes(nodes, "job-7", 2)))
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assert (cluster.name, [host.address for host in cluster.hosts]) == ("job-7", ["10.0.0.2", "10.0.0.3"])
    assert ([host.ipus for host in cluster.hosts], cluster.num_instances) == ([16, 16], 4)
    assert "ipus_per_host" not in cluster_of_nodes([node("10.0.0.2", Resources=HEAD)], "pod", 1)["metadata"]["raypod"]


def test_the_nodes_of_a_cluster_are_waited_for(
    ray: ScriptedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nodes() -> Iterator[List[Dict[str, Any]]]:
        head = node("10.0.0.9", Resources=HEAD)
        joined = [node("10.0.0.10"), node("10.0.0.3", Alive=False), node("10.0.0.2"), head]
        yield from [joined[:1]] * 40
        while True:
            yield joined

    found = nodes()
    monkeypatch.setattr(ray, "nodes", lambda: next(found))
    monkeypatch.setattr(ray_cluster_file, "running_session", lambda: contextlib.nullcontext(ray))
    output = tmp_path / "cluster.yaml"
    assert main(["cluster-file", "--hosts", "3", "--output", str(output), "--wait-s", "60"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{output}: 3 hosts: 10.0.0.9, 10.0.0.2, 10.0.0.10\n"
    assert said.err == "raypod: 1 of 3 Ray nodes have joined: 10.0.0.10\n"
    assert [host.address for host in read_cluster(str(output)).hosts] == ["10.0.0.9", "10.0.0.2", "10.0.0.10"]
    assert main(["cluster-file", "--hosts", "4", "--output", str(tmp_path / "no"), "--wait-s", "2"]) == 2
    assert "3 of 4 Ray nodes have joined within 2 s: 10.0.0.10, " in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "x"], "--hosts"),
        (["--hosts", "0", "--output", "x"], "--hosts 0 must be at least 1"),
        (["--hosts", "1", "--output", "x", "--wait-s", "-1"], "--wait-s -1 must be between"),
        (["--hosts", "1", "--output", "x"], "no Ray cluster is running on this host"),
    ],
)
def test_mistakes_are_one_line(
    words: List[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert main(["cluster-file", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())
