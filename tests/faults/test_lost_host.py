"""Hosts are lost or frozen: their instances move to a spare host, then to a used one; the weights are the same."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Iterator

import pytest
from harness import assert_undisturbed, plan_for, run
from ray_cluster import SECOND_HOST, THIRD_HOST, RayCluster, end_host, processes_of, ray_cluster

from raypod.fleet import ray_replace
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

HAS_OLD_RAY = tuple(int(part) for part in version("ray").split(".")[:2]) < (2, 50)


@pytest.fixture
def hosts() -> Iterator[RayCluster]:
    """A Ray cluster of three hosts on this machine; the driver is on the first."""
    with ray_cluster(("", SECOND_HOST, THIRD_HOST)) as started:
        try:
            yield started
        finally:
            for process in processes_of(started.nodes[2]):  # Ray cannot end frozen processes
                process.kill()


@pytest.mark.skipif(
    HAS_OLD_RAY, reason="Ray 2.10 is often too slow to start work on the spare host before it is given up"
)
def test_the_instances_of_a_lost_host_move_to_a_spare_host_then_to_a_used_one(
    hosts: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_replace, "_ACTOR_START_S", 20.0)  # three hosts share this machine
    for name in ("inline", "ray"):
        (tmp_path / name).mkdir()
    long = {"updates": 160}
    inline = plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, training=long)
    head, second, spare = hosts.nodes
    addresses = (head.node_ip_address, SECOND_HOST, THIRD_HOST)
    cluster = Cluster("three", tuple(Host(address, address) for address in addresses))
    plan = plan_for(tmp_path / "ray", cluster, pod={"num_instances": 2}, training=long, run={"silent_after_s": 6})
    assert [host.name for host in plan.placement.hosts] == list(addresses[:2])

    def end_second(plan: Plan) -> None:
        end_host(hosts, second)

    def freeze_spare(plan: Plan) -> None:
        for process in processes_of(spare):
            process.suspend()

    outcome = run(plan, [(6, end_second), (14, freeze_spare)])
    assert_undisturbed(plan, outcome, run(inline))
    assert [(loss.instance, loss.host, loss.kind) for loss in outcome.losses] == [
        (1, SECOND_HOST, "died"),
        (1, THIRD_HOST, "silent"),
    ], "\n".join(map(str, outcome.losses))
    assert [repair.hosts for repair in outcome.repairs] == [(THIRD_HOST,), (head.node_ip_address,)]
