"""Plans with fewer replicas: which one continues on the hosts that respond, and the samples of its updates."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.errors import ConfigError
from raypod.plan.cluster import Cluster, Host, VipuPartition
from raypod.plan.elastic import Room, largest_fit, sizes_of, smaller_plans
from raypod.plan.plan import DatasetSize, Plan, TaskFacts, make_plan
from raypod.plan.resolve import from_values
from raypod.plan.tables import render
from raypod.training.data.order import call_positions


def plan_on(hosts: int, replicas: int, instances: Optional[int] = None, **training: Any) -> Plan:
    """A plan whose hosts are named a, b, c, ..."""
    cluster = Cluster("pod", tuple(Host(name, name) for name in "abcdefghijklmnop"[:hosts]))
    config = from_values({"training": training, "pod": {"replicas": replicas, "num_instances": instances or hosts}})
    return make_plan(config, cluster, TaskFacts(DatasetSize(20_000, 0)), "run")


def rooms(names: str, replicas: int) -> List[Room]:
    return [Room(name, replicas) for name in names]


def hosts_of(plan: Plan) -> str:
    return "".join(host.name for host in plan.placement.hosts)


@pytest.mark.parametrize(
    ("hosts", "replicas", "left", "expected"),
    [
        (2, 4, "ab", (4, 1, "ab")),
        (2, 4, "a", (2, 2, "a")),
        (2, 4, "b", (2, 2, "b")),
        (4, 4, "abd", (2, 2, "ab")),
        (4, 8, "acd", (4, 2, "ac")),
        (4, 8, "d", (2, 4, "d")),
        (8, 8, "abcdefg", (4, 2, "abcd")),
        (3, 6, "ac", (2, 3, "ac")),  # 6 micro-batches cannot be divided between 4 replicas
        (3, 3, "ab", (1, 3, "a")),
        (1, 1, "a", (1, 1, "a")),
    ],
)
def test_the_largest_power_of_two_continues(hosts: int, replicas: int, left: str, expected: Any) -> None:
    full = plan_on(hosts, replicas)
    plan = largest_fit(full, rooms(left, replicas // hosts))
    assert (*sizes_of(plan), hosts_of(plan)) == expected
    assert plan.geometry.global_batch_size == full.geometry.global_batch_size
    assert plan.geometry.samples_per_call == full.geometry.samples_per_call
    assert (plan.total_updates, plan.updates_per_epoch) == (full.total_updates, full.updates_per_epoch)
    assert sorted(host.name for host in plan.placement.cluster.hosts) == list("abcdefgh"[:hosts])
    assert (plan.config.pod.replicas, plan.config.training.gradient_accumulation) == sizes_of(plan)


def test_accumulation_instances_and_room_of_the_hosts_limit_the_replicas() -> None:
    assert sizes_of(largest_fit(plan_on(3, 6, gradient_accumulation=2), rooms("ac", 2))) == (4, 3)
    plan = largest_fit(plan_on(2, 8, instances=4), rooms("b", 4))  # several instances of a host stay several
    assert [(spec.host, spec.local_replicas) for spec in plan.placement.instances] == [("b", 2), ("b", 2)]
    full = plan_on(2, 4)
    plan = largest_fit(full, rooms("b", 4))  # a host with more room takes all replicas
    assert (sizes_of(plan), hosts_of(plan), plan.geometry.num_instances) == (sizes_of(full), "b", 2)
    plan = largest_fit(plan_on(4, 8), [Room("a", 1), Room("b", 2), Room("d", 2)])  # a host without enough is left out
    assert (sizes_of(plan), hosts_of(plan)) == ((4, 2), "bd")


@pytest.mark.parametrize("room", [[], rooms("a", 0)])
def test_without_room_the_error_names_the_hosts(room: List[Room]) -> None:
    with pytest.raises(ConfigError, match=r"can continue on the hosts that respond: (none|a \(0\))$") as caught:
        largest_fit(plan_on(2, 4), room)
    assert "\n" not in str(caught.value)


def test_the_graph_compile_domains_of_a_partition_limit_the_instances() -> None:
    full = plan_on(2, 4)
    partition = VipuPartition("p", gcds=2)
    cluster = dataclasses.replace(full.placement.cluster, vipu=partition)
    full = dataclasses.replace(full, placement=dataclasses.replace(full.placement, cluster=cluster))
    assert sizes_of(largest_fit(full, rooms("a", 2))) == (2, 2)
    with pytest.raises(ConfigError, match="partition p has 2 GCDs and the run 1 instance"):
        largest_fit(full, rooms("a", 2), uses_partition=True)


def test_the_plan_shows_what_the_run_continues_with() -> None:
    plans = smaller_plans(plan_on(4, 8))
    assert [(*sizes_of(plan), hosts_of(plan)) for plan in plans] == [(4, 2, "ab"), (2, 4, "a")]
    assert smaller_plans(plan_on(1, 4)) == []
    pod = {"replicas": 8, "num_instances": 4, "min_hosts": 2}
    limited = dataclasses.replace(plan_on(4, 8), config=from_values({"pod": pod}))
    assert "elastic  while hosts are lost: 4 replicas x 2 (accumulation) on 2 hosts\n" in render(limited)
    assert "elastic" not in render(plan_on(4, 8))


def samples_of_update(plan: Plan, update: int) -> List[List[int]]:
    """The positions of each micro-batch of an update, in the order of the accumulation step and the replica."""
    geometry = plan.geometry
    call, of_call = divmod(update, geometry.device_iterations)
    shape = (geometry.device_iterations, geometry.gradient_accumulation, geometry.local_replicas, -1)
    instances = range(geometry.num_instances)
    parts = [call_positions(geometry, instance, call).reshape(shape)[of_call] for instance in instances]
    micro_batches: List[List[int]] = np.concatenate(parts, axis=1).reshape(-1, geometry.micro_batch_size).tolist()
    return micro_batches


@given(
    of=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    left=st.integers(1, 8),
    update=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_update_has_the_same_micro_batches_in_the_same_order(of: Any, sizes: Any, left: int, update: int) -> None:
    (hosts, per_host), names = of, ("batch_size", "gradient_accumulation", "device_iterations")
    full = plan_on(hosts, hosts * per_host, **dict(zip(names, sizes)))
    plan = largest_fit(full, rooms("abcdefgh"[: min(left, hosts)], per_host))
    assert plan.geometry.total_replicas == per_host * max(1 << k for k in range(4) if 1 << k <= min(left, hosts))
    assert samples_of_update(plan, update) == samples_of_update(full, update)
