"""Replacements of lost instances, with a scripted Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
from scripted_ray import NEVER, Ref, ScriptedActor, ScriptedRay

from raypod.errors import HostLost
from raypod.events import InstanceStarted
from raypod.fleet import ray_replace
from raypod.fleet.ray import RayFleet
from raypod.fleet.ray_replace import Replacements
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.tasks.registry import facts_of

NODE = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "127.0.0.2"}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    scripted = ScriptedRay(monkeypatch)
    monkeypatch.setattr(scripted, "nodes", lambda: [NODE])
    monkeypatch.setattr(ray_replace, "draining_nodes", set)
    monkeypatch.setattr(ray_replace, "host_name", lambda placement, node: "second")
    return scripted


def replacements(ray: ScriptedRay, leaves_after_s: float, ready_s: float) -> Any:
    """Start replacements for instance 1 whose process responds at a time; the process must leave after another one."""
    pod, run = SimpleNamespace(is_elastic=True), SimpleNamespace(start_timeout_s=300.0)
    placement = SimpleNamespace(cluster=SimpleNamespace(is_local=True), instances=[SimpleNamespace(host_index=0)] * 2)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(pod=pod, run=run), placement=placement, log_file=lambda index: f"instance-{index}.log"
    )
    bundles: Any = SimpleNamespace(node_ids=["a"], options=lambda index, count: {}, bundles=[{}])
    placement.instances_on = lambda index: [0, 1]
    killer: Any = ray
    leave_s = ray.now_s + leaves_after_s
    started: List[int] = []

    def start_actor(index: int, node: Dict[str, Any], options: Dict[str, Any]) -> ScriptedActor:
        started.append(index)
        return ScriptedActor(index, {"beat": lambda: Ref(None, ready_s)})

    found = Replacements(ray, plan, bundles, killer, lambda: ray.now_s >= leave_s)
    return found.start([1], [NODE, NODE], False, start_actor)


def test_a_process_that_responds_replaces_the_lost_one(ray: ScriptedRay) -> None:
    (index,) = replacements(ray, NEVER, ray.now_s + 20)
    assert index == 1
    assert not ray.killed


def test_an_elastic_run_gives_a_silent_host_up(ray: ScriptedRay) -> None:
    began_s = ray.now_s
    with pytest.raises(HostLost):
        replacements(ray, NEVER, NEVER)
    assert 30 <= ray.now_s - began_s < 31


@pytest.mark.parametrize("noticed_after_s", [0, 5])
def test_a_preempted_run_waits_for_no_replacement(ray: ScriptedRay, noticed_after_s: float) -> None:
    began_s = ray.now_s
    with pytest.raises(HostLost):
        replacements(ray, noticed_after_s, NEVER)
    assert noticed_after_s <= ray.now_s - began_s < noticed_after_s + 1
    assert ray.killed == [1] * (noticed_after_s > 0)


def test_a_replaced_instance_is_on_the_host_to_which_it_was_moved() -> None:
    config = from_values({"pod": {"replicas": 2, "num_instances": 2}, "run": {"device": "emulated"}})
    cluster = Cluster("two", (Host("a", "10.0.0.1"), Host("b", "10.0.0.2")))
    plan: Plan = make_plan(config, cluster, facts_of(config), "/run")
    fleet = RayFleet(plan)
    fleet._nodes = [{"NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "a"}] * 2
    fleet._started = [InstanceStarted(index, "ab"[index], 385, "emulated", "", 1, ()) for index in range(2)]
    assert [each.host for each in fleet.started()] == ["a", "a"]
