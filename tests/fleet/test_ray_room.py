"""Tests of fleet/ray_room: which hosts have room for how many replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import pytest

from raypod.fleet import ray_room
from raypod.fleet.ray_room import HostRoom
from raypod.plan.cluster import Cluster, Host
from raypod.plan.elastic import Room
from raypod.plan.plan import DatasetSize, Plan, TaskFacts, make_plan
from raypod.plan.resolve import from_values


class RayError(Exception):
    """Base class of the errors of Ray."""


class FakeRay:
    """Ray with a node for each of `alive`; those in `silent` run no task, and those in `dead` fail it."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, ipus: Optional[Dict[str, int]] = None) -> None:
        self.alive, self.silent, self.dead = list("abc"), set(), set()  # type: List[str], Set[str], Set[str]
        self.cancelled: List[str] = []
        self._ipus = ipus or {}

    def nodes(self) -> List[Dict[str, Any]]:
        def node(name: str) -> Dict[str, Any]:
            resources = {"IPU": float(self._ipus[name])} if name in self._ipus else {}
            address = {"NodeManagerAddress": name, "NodeManagerHostname": f"host-{name}"}
            return {"NodeID": name, "Alive": name in self.alive, **address, "Resources": resources}

        return [node(name) for name in "abc"]

    def remote(self, function: Callable[[], None]) -> Any:
        return SimpleNamespace(options=lambda node, max_retries: SimpleNamespace(remote=lambda: node))

    def wait(self, tasks: List[str], num_returns: int, timeout: float) -> Tuple[List[str], List[str]]:
        assert num_returns == len(tasks)
        return [task for task in tasks if task not in self.silent], [task for task in tasks if task in self.silent]

    def get(self, task: str) -> None:
        if task in self.dead:
            raise RayError(task)

    def cancel(self, task: str, force: bool) -> None:
        assert force
        self.cancelled.append(task)


@pytest.fixture(autouse=True)
def draining(monkeypatch: pytest.MonkeyPatch) -> Set[str]:
    found: Set[str] = set()
    monkeypatch.setattr(ray_room, "draining_nodes", lambda: found)
    monkeypatch.setattr(ray_room, "node_affinity", lambda node: {"node": node["NodeID"]})
    monkeypatch.setattr(ray_room, "_POLL_INTERVAL_S", 0.01)
    return found


def plan_on(hosts: str, wait_hosts: float = 0, ipus_per_replica: int = 1) -> Plan:
    cluster = Cluster("pod", tuple(Host(name, name.strip("*")) for name in hosts.split(",")))
    pod = {"replicas": 6, "num_instances": 3, "elastic": True, "wait_hosts": wait_hosts}
    pod["ipus_per_replica"] = ipus_per_replica
    training = {"gradient_accumulation": 3, "model": "tiny"}
    config = from_values({"pod": pod, "training": training})
    return make_plan(config, cluster, TaskFacts(DatasetSize(100_000, 0)), "run")


def room_of(ray: FakeRay, plan: Plan) -> HostRoom:
    return HostRoom(ray, plan, lambda line: None)


def test_an_emulated_host_has_room_for_the_replicas_that_the_plan_puts_on_a_host(draining: Set[str]) -> None:
    ray = FakeRay()
    room = room_of(ray, plan_on("a,b,c"))
    assert room.alive() == room.responsive() == [Room("a", 2), Room("b", 2), Room("c", 2)]
    draining.add("b")
    ray.alive = ["a", "b"]
    assert room.alive() == room.responsive() == [Room("a", 2)]


def test_the_ipus_of_a_node_limit_its_replicas() -> None:
    ray = FakeRay({"a": 8, "b": 3})
    assert room_of(ray, plan_on("a,b,c", ipus_per_replica=2)).alive() == [Room("a", 4), Room("b", 1), Room("c", 0)]


def test_silent_and_dead_hosts_are_left_out() -> None:
    ray = FakeRay()
    ray.silent, ray.dead = {"a"}, {"b"}
    assert room_of(ray, plan_on("a,b,c")).responsive() == [Room("c", 2)]
    assert ray.cancelled == ["a"]
    ray.alive = []
    assert room_of(ray, plan_on("a,b,c")).responsive() == []


def test_a_node_with_two_names_counts_once() -> None:
    assert [each.host for each in room_of(FakeRay(), plan_on("b,host-b,c")).alive()] == ["b", "c"]


def test_a_wait_ends_when_there_is_enough_or_the_run_is_stopped_or_its_time_is_over() -> None:
    ray, lines = FakeRay(), []  # type: FakeRay, List[str]
    ray.alive = ["a"]
    room = HostRoom(ray, plan_on("a,b,c", wait_hosts=60), lines.append)
    asked: List[List[Room]] = []

    def returns(found: List[Room]) -> bool:
        asked.append(found)
        ray.alive = ["a", "b"]
        return len(found) == 2

    assert [each.host for each in room.wait(returns, lambda: False)] == ["a", "b"]
    assert len(asked) == 2
    assert lines == ["waiting for b, c (60 s more, --wait-hosts)"]
    assert room.wait(lambda found: False, lambda: True) == asked[1]
    assert HostRoom(ray, plan_on("a,b,c"), lines.append).wait(lambda found: False, lambda: False) == asked[1]
    assert len(lines) == 1
