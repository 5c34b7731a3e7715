"""Whole hosts are lost: instances move to a spare one, then beside others; the weights of an undisturbed run."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import pytest
from harness import HAS_OLD_RAY, assert_undisturbed, plan_for, run

from raypod.cluster import Cluster, Host
from raypod.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SECOND, SPARE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def hosts() -> Iterator[Dict[str, Any]]:
    """A Ray cluster of three hosts on this machine, and its nodes by address."""
    environment = dict(os.environ)
    ray = importlib.import_module("ray")
    cluster_utils = importlib.import_module("ray.cluster_utils")
    cluster = cluster_utils.Cluster()
    nodes: Dict[str, Any] = {}
    for address in ("", SECOND, SPARE):
        where = {"node_ip_address": address} if address else {}
        sizes = {"num_cpus": 1, "object_store_memory": 80_000_000}
        nodes[address] = cluster.add_node(include_dashboard=False, **sizes, **where)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", namespace="tests")
    head = next(node["NodeManagerAddress"] for node in ray.nodes() if not node["NodeManagerAddress"].startswith("127."))
    yield {"cluster": cluster, "nodes": nodes, "head": head}
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.skipif(HAS_OLD_RAY, reason="the cluster_utils of Ray 2.10 refuse to end such a node")
def test_the_instances_of_a_lost_host_move_to_a_spare_one_then_beside_others(
    hosts: Dict[str, Any], tmp_path: Path
) -> None:
    for name in ("inline", "ray"):
        (tmp_path / name).mkdir()
    long = {"updates": 160}  # until a node has ended, the run gets on
    inline = plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, training=long)
    cluster = Cluster("three", tuple(Host(address, address) for address in (hosts["head"], SECOND, SPARE)))
    plan = plan_for(tmp_path / "ray", cluster, pod={"num_instances": 2}, training=long)
    assert [host.name for host in plan.hosts] == [hosts["head"], SECOND]

    def end(update: int, address: str) -> Tuple[int, Callable[[Plan], None]]:
        return update, lambda plan: hosts["cluster"].remove_node(hosts["nodes"][address], allow_graceful=False)

    told = run(plan, [end(6, SECOND), end(14, SPARE)])
    assert_undisturbed(plan, told, run(inline).sha256)
    assert [(loss.instance, loss.host) for loss in told.losses] == [(1, SECOND), (1, SPARE)]
    assert [repair.hosts for repair in told.repairs] == [(SPARE,), (hosts["head"],)]
