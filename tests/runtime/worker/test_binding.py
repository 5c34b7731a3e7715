"""The process of an instance takes its share of the cores of its host."""

from __future__ import annotations

import os
from typing import Callable, Dict, List, Tuple

import pytest

from raypod.plan.plan import Plan
from raypod.runtime.worker import environment
from raypod.runtime.worker.environment import take_cores
from raypod.system import cores

AT_A_TIME, CPUS = "EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"
Taken = Callable[[Plan, int], Tuple[List[List[int]], Dict[str, str]]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """A function that takes the cores of an instance on a host of 2 nodes with 4 cores; returns what it changed."""
    host = [cores.Core(cpu // 4, (cpu,)) for cpu in range(8)]
    monkeypatch.setattr(cores, "usable_cores", lambda: host)

    def take(plan: Plan, index: int) -> Tuple[List[List[int]], Dict[str, str]]:
        bound: List[List[int]] = []
        monkeypatch.setattr(environment, "bind_process", bound.append)
        for name in (AT_A_TIME, CPUS):
            monkeypatch.setenv(name, "inherited")
            monkeypatch.delenv(name)
        take_cores(plan.placement, plan.placement.instances[index])
        return bound, {name: os.environ[name] for name in (AT_A_TIME, CPUS) if name in os.environ}

    return take


def test_instances_share_the_cpus_of_their_host(make: Callable[..., Plan], taken: Taken) -> None:
    plan = make(pod={"replicas": 16, "num_instances": 2})
    assert taken(plan, 0) == ([], {AT_A_TIME: "4"})  # 2 x 4 threads on 8 cores, not 2 x 8
    assert taken(make(pod={"replicas": 2, "num_instances": 2}), 1) == ([], {AT_A_TIME: "1"})
    assert taken(make(pod={"replicas": 4, "num_instances": 2, "threads_per_replica": 4}), 1)[1] == {AT_A_TIME: "1"}
    assert taken(make(pod={"replicas": 32, "num_instances": 16}), 15)[1] == {AT_A_TIME: "1"}


def test_bound_instances_have_their_own_cores(make: Callable[..., Plan], taken: Taken) -> None:
    plan = make(pod={"replicas": 8, "num_instances": 4, "bind_cores": True})
    found = [taken(plan, index) for index in range(4)]
    assert [bound for bound, _ in found] == [[[0, 1]], [[4, 5]], [[2, 3]], [[6, 7]]]
    assert [variables[CPUS] for _, variables in found] == ["0;1", "4;5", "2;3", "6;7"]
    # An instance that is alone on its host has all its cores, and its replicas are spread over the nodes.
    alone = make(pod={"replicas": 2, "num_instances": 1, "bind_cores": True})
    assert taken(alone, 0) == ([], {CPUS: "0,1,2,3;4,5,6,7"})
