"""Replacements of lost instances, standbys, and the end of frozen processes, with a scripted Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Set, Tuple

import pytest

from raypod.errors import HostLost
from raypod.events import InstanceStarted
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.runtime.workers import ray_replace
from raypod.runtime.workers.ray import RayFleet
from raypod.runtime.workers.ray_replace import ProcessKiller, Replacements, Standbys, kill_process
from raypod.system.activity_record import Identity
from raypod.system.process import process_start_ticks
from raypod.training.tasks.registry import facts_of
from tests.support.scripted_ray import NEVER, ActorDied, RayError, Ref, ScriptedActor, ScriptedRay, TaskError, node


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> Set[str]:
    found: Set[str] = set()
    monkeypatch.setattr(ray_replace, "draining_nodes", lambda: found)
    monkeypatch.setattr(ray_replace, "node_affinity", lambda node: {"node": node["NodeID"]})
    return found


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, draining: Set[str]) -> ScriptedRay:
    return ScriptedRay(monkeypatch, *map(node, "abc"))


class Scene:
    """Two instances on the hosts a and b of a cluster with a third one; `ready_s` maps nodes to when actors respond."""

    def __init__(self, ray: ScriptedRay, cluster: str = "abc", is_elastic: bool = True) -> None:
        hosts = Cluster("pod", tuple(Host(f"host {name}", name) for name in cluster)) if cluster else LOCAL
        self.ray, self.ready_s, self.leave_s = ray, dict.fromkeys("abc", NEVER), NEVER
        self.started: List[Tuple[int, str, Any]] = []
        specs = [SimpleNamespace(host_index=0), SimpleNamespace(host_index=1)]
        placement = SimpleNamespace(cluster=hosts, hosts=hosts.hosts, instances=specs, instances_on=lambda host: [host])
        placement.sizes = SimpleNamespace(local_ipus=2)
        config = SimpleNamespace(pod=SimpleNamespace(is_elastic=is_elastic), run=SimpleNamespace(start_timeout_s=300.0))
        plan: Any = SimpleNamespace(config=config, placement=placement, log_file="{}.log".format, run_dir="run")
        reservation: Any = SimpleNamespace(node_ids=["a", "b"], bundles=[{"IPU": 2.0}] * 2)
        reservation.options = lambda host, share: {"bundle": (host, share)}
        killer: Any = ray
        self.replacements = Replacements(ray, plan, reservation, killer, lambda: ray.now_s >= self.leave_s)

    def start(self, lost: List[int], may_share_hosts: bool = False, nodes: str = "ab") -> Dict[int, str]:
        def start_actor(index: int, on: Dict[str, Any], options: Dict[str, Any]) -> ScriptedActor:
            self.started.append((index, on["NodeID"], options))
            ready_s = self.ready_s[on["NodeID"]]
            error = ActorDied("it did not start") if ready_s < 0 else None
            return ScriptedActor(index, {"beat": lambda: Ref(error, ready_s)})

        found = self.replacements.start(lost, list(map(node, nodes)), may_share_hosts, start_actor)
        return {index: each.node["NodeID"] for index, each in found.items()}


def test_an_instance_is_replaced_in_its_part_of_the_reservation(ray: ScriptedRay) -> None:
    scene = Scene(ray)
    scene.ready_s["b"] = ray.now_s + 9.5
    assert (scene.start([1]), scene.started) == ({1: "b"}, [(1, "b", {"bundle": (1, 1)})])
    assert not ray.killed
    config = from_values({"pod": {"replicas": 2, "num_instances": 2}, "run": {"device": "emulated"}})
    cluster = Cluster("two", (Host("first", "a"), Host("second", "b")))
    fleet = RayFleet(make_plan(config, cluster, facts_of(config), "/run"))
    fleet._nodes = [node("a"), node("a")]
    fleet._started = [InstanceStarted(index, "ab"[index], 385, "emulated", "", 1, ()) for index in range(2)]
    assert [each.host for each in fleet.started()] == ["first", "first"]


@pytest.mark.parametrize("silent_s", [NEVER, -1.0])
def test_a_silent_host_is_left_for_an_unused_one_then_for_a_used_one(ray: ScriptedRay, silent_s: float) -> None:
    scene, began_s = Scene(ray), ray.now_s
    scene.ready_s.update(a=0.0, b=silent_s, c=silent_s)
    assert scene.start([1], may_share_hosts=True) == {1: "a"}
    elsewhere = {"max_restarts": 0}
    assert scene.started[1:] == [(1, "c", {"node": "c", **elsewhere}), (1, "a", {"node": "a", **elsewhere})]
    assert (ray.killed, ray.now_s - began_s) == ([1, 1], 20 if silent_s > 0 else 0)
    scene.ready_s["c"] = 0.0
    assert scene.start([1]) == {1: "c"}
    assert scene.started[-1] == (1, "c", {"node": "c", **elsewhere, "resources": {"IPU": 2.0}})


def test_two_lost_instances_are_replaced_on_hosts_of_their_own_and_none_if_one_has_no_host(ray: ScriptedRay) -> None:
    scene = Scene(ray)
    scene.ready_s.update(a=0.0, b=0.0)
    assert scene.start([0, 1]) == {0: "a", 1: "b"}
    scene.ready_s["b"], scene.leave_s = NEVER, ray.now_s + 5
    with pytest.raises(HostLost, match="host host b is lost, with instance 1: neither this host nor any other host"):
        scene.start([0, 1])
    assert ray.killed == [1, 0]  # also the replacement that was found


@pytest.mark.parametrize(
    ("hosts", "ready", "nodes", "may_share", "on"),
    [
        ("abcd", "cd", "ab", True, "cd"),
        ("abcd", "cd", "ab", False, "cd"),
        ("abcd", "acd", "ab", True, "ac"),
        ("abcd", "acd", "ab", False, "ac"),
        ("abc", "c", "ab", True, "cc"),  # they share the only spare one if they may
        ("abc", "c", "ab", False, None),
        ("abcd", "cd", "bb", False, "cc"),  # instances of one lost host stay together
    ],
)
def test_instances_of_lost_hosts_are_on_spare_ones(
    ray: ScriptedRay, hosts: str, ready: str, nodes: str, may_share: bool, on: Optional[str]
) -> None:
    scene = Scene(ray, hosts)
    ray.found_nodes = list(map(node, hosts))
    scene.ready_s.update({**dict.fromkeys(hosts, NEVER), **dict.fromkeys(ready, 0.0)})
    if on is None:
        with pytest.raises(HostLost, match="with instance 1"):
            scene.start([0, 1])
    else:
        assert scene.start([0, 1], may_share, nodes) == dict(enumerate(on))


@pytest.mark.parametrize(
    ("is_elastic", "noticed_s", "seconds"), [(True, NEVER, 30), (False, NEVER, 300), (True, 0, 0), (True, 5, 5)]
)
def test_when_a_run_gives_its_last_host_up(
    ray: ScriptedRay, is_elastic: bool, noticed_s: float, seconds: float
) -> None:
    scene, began_s = Scene(ray, "", is_elastic), ray.now_s
    scene.leave_s = began_s + noticed_s
    with pytest.raises(HostLost):
        scene.start([1])
    assert seconds <= ray.now_s - began_s < seconds + 1
    assert noticed_s == NEVER or ray.killed == [1] * (noticed_s > 0)


def test_there_is_room_on_hosts_that_are_not_drained(ray: ScriptedRay, draining: Set[str]) -> None:
    room, nodes = Scene(ray).replacements.has_room_for, [node("a"), node("b")]
    draining.add("b")
    assert room((1,), nodes, False)
    draining.add("c")
    assert not room((1,), nodes, False)
    assert room((1,), nodes, True)
    draining.add("a")  # the coordinator's own
    assert not room((1,), nodes, True)
    draining.clear()
    ray.found_nodes = [node("a"), node("d")]  # d is not in the cluster
    assert [room((0, 1), [node("b"), node("b")], may_share) for may_share in (False, True)] == [False, True]


def test_a_frozen_process_is_killed_by_its_pid_on_its_host(ray: ScriptedRay) -> None:
    tasks: List[Any] = []
    ray.start = lambda options, *identity: tasks.append((options["node"], identity)) or Ref(None, NEVER)
    killer = ProcessKiller(ray)
    frozen, other = Identity(77, 5, 3, 4), Identity(78, 6, 3, 4)
    identities = {0: Ref(frozen), 1: Ref(None, NEVER), 2: Ref(RayError("it did not start")), 3: Ref(other)}
    actors = [ScriptedActor(index, {"identity": lambda ref=ref: ref}) for index, ref in identities.items()]
    for actor in actors:
        killer.register(actor, node("b"))
    killer.kill(actors[3])
    for actor in actors:
        killer.kill_frozen(actor)
    assert (tasks, ray.killed) == ([("b", (frozen,))], [3, 0, 1, 2, 3])
    began_s = ray.now_s
    killer.close()
    killer.close()
    assert (ray.now_s - began_s, len(ray.cancelled)) == (10, 1)


NODES = [node("a"), node("b")]


class StandbyScene:
    """Two standbys on each of two hosts; `prepared` and `begun` hold the result of each actor, in starting order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prepared: Dict[int, Ref], begun: Dict[int, Ref]) -> None:
        monkeypatch.setattr(ray_replace, "node_affinity", lambda node: {"node": node["NodeID"]})
        self.ray = ScriptedRay(monkeypatch, *NODES)
        self.prepared, self.begun = prepared, begun
        self.started: List[str] = []
        self.begins: List[Any] = []
        self.lines: List[str] = []
        instances = [SimpleNamespace(host="host-a"), SimpleNamespace(host="host-b")]
        config = SimpleNamespace(run=SimpleNamespace(standby=2))
        plan: Any = SimpleNamespace(config=config, placement=SimpleNamespace(instances=instances))
        self.standbys = Standbys(self.ray, plan, self._start, self.ray.kill_frozen, self.lines.append)
        self.standbys.fill(NODES)

    def _start(self, index: Optional[int], node: Dict[str, Any], options: Dict[str, Any]) -> Any:
        assert index is None
        assert options == {"node": node["NodeID"], "max_restarts": 0}
        number = len(self.started)
        self.started.append(node["NodeID"])

        def begin(index: int, how: str) -> Ref:
            self.begins.append((number, index))
            return self.begun.get(number, Ref(None))

        prepare = lambda host_index: self.prepared.get(number, Ref(host_index))  # noqa: E731
        return ScriptedActor(number, {"prepare": prepare, "begin": begin})

    def take(self, index: int, name: str) -> Optional[int]:
        taken = self.standbys.take(index, node(name))
        return None if taken is None else int(taken.index)


def test_each_host_has_its_standbys_and_those_that_are_taken_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = StandbyScene(monkeypatch, {}, {})
    assert (scene.started, scene.take(1, "b")) == (["a", "a", "b", "b"], 2)
    assert scene.take(0, "c") is None  # a spare host has none
    scene.standbys.fill(NODES)
    assert scene.started == ["a", "a", "b", "b", "b"]
    scene.standbys.close()
    assert (sorted(scene.ray.killed), scene.begins, scene.lines) == ([0, 1, 3, 4], [(2, 1)], [])


def test_the_first_prepared_one_is_taken_and_none_that_is_not_prepared_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = StandbyScene(monkeypatch, {0: Ref(None, 1004.0), 1: Ref(None, 1002.0), 2: Ref(None, NEVER)}, {})
    assert (scene.take(0, "a"), scene.ray.now_s) == (1, 1002.0)
    assert (scene.take(0, "a"), scene.take(1, "b")) == (0, 3)
    assert scene.take(1, "b") is None
    assert scene.ray.now_s == 1004.0 + ray_replace._WITHIN_S
    assert not scene.ray.killed  # it is still being prepared
    assert scene.lines == ["a standby on host-b cannot be used for instance 1: not prepared within 5 s"]


def test_one_that_failed_died_or_is_frozen_is_ended_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, begun = {0: Ref(ActorDied("out of memory"))}, {1: Ref(None, NEVER), 2: Ref(ActorDied("killed"))}
    scene = StandbyScene(monkeypatch, prepared, begun)
    assert scene.take(0, "a") is None
    assert (scene.take(1, "b"), scene.ray.killed) == (3, [0, 1, 2])
    causes = ["out of memory", "it did not respond within 5 s", "killed"]
    lines = [f"a standby on host-{host} cannot be used for instance {index}" for host, index in ("a0", "a0", "b1")]
    assert scene.lines == [f"{line}: {cause}" for line, cause in zip(lines, causes)]
    scene = StandbyScene(monkeypatch, {number: Ref(TaskError(OSError("no such\ndisk"))) for number in (0, 1)}, {})
    assert scene.take(0, "a") is None
    assert scene.lines == [f"{lines[0]}: OSError: no such disk"] * 2


def test_a_frozen_process_is_killed_but_no_other_process_with_its_pid(processes: None) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        ticks = process_start_ticks(process.pid)
        assert ticks is not None
        process.send_signal(signal.SIGSTOP)
        kill_process(Identity(process.pid, ticks - 1, 0, 0))
        assert process.poll() is None
        kill_process(Identity(process.pid, ticks, 0, 0))
        assert process.wait(10) == -signal.SIGKILL
    kill_process(Identity(process.pid, ticks, 0, 0))  # it has ended; nothing happens
