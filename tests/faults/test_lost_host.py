"""Whole hosts are lost or fall silent: instances move to a spare one, then beside others; the same weights."""

from __future__ import annotations

import contextlib
import importlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, Iterator, List

import psutil
import pytest
from harness import assert_undisturbed, plan_for, run

from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

HAS_OLD_RAY = tuple(int(part) for part in version("ray").split(".")[:2]) < (2, 50)
SECOND, SPARE = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def hosts() -> Iterator[Dict[str, Any]]:
    """A Ray cluster of three hosts on this machine, and its nodes by address; the driver is on the first."""
    environment = dict(os.environ)
    ray = importlib.import_module("ray")
    cluster_utils = importlib.import_module("ray.cluster_utils")
    cluster = cluster_utils.Cluster()
    nodes: Dict[str, Any] = {}
    for address in ("", SECOND, SPARE):
        where = {"node_ip_address": address} if address else {}
        sizes = {"num_cpus": 1, "object_store_memory": 80_000_000}
        nodes[address] = cluster.add_node(include_dashboard=False, **sizes, **where)
    head = nodes[""].node_ip_address
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    # Ray 2.10 would take the last node's address for this process's own.
    ray.init(address=cluster.address, namespace="tests", _node_ip_address=head, **quiet)
    yield {"cluster": cluster, "nodes": nodes, "head": head}
    for process in processes_of(nodes[SPARE]):  # nobody else could end what is frozen
        process.kill()
    ray.shutdown()
    cluster.shutdown()
    os.environ.clear()
    os.environ.update(environment)


def processes_of(node: Any) -> List[psutil.Process]:
    """All that runs on a node of Ray, its raylet first."""
    found: List[psutil.Process] = []
    for infos in node.all_processes.values():
        for info in infos:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


@pytest.mark.skipif(
    HAS_OLD_RAY, reason="Ray 2.10 is often too slow to start work on the spare host before it is given up"
)
def test_the_instances_of_a_lost_host_move_to_a_spare_one_then_beside_others(
    hosts: Dict[str, Any], tmp_path: Path
) -> None:
    for name in ("inline", "ray"):
        (tmp_path / name).mkdir()
    long = {"updates": 160}
    inline = plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, training=long)
    cluster = Cluster("three", tuple(Host(address, address) for address in (hosts["head"], SECOND, SPARE)))
    plan = plan_for(tmp_path / "ray", cluster, pod={"num_instances": 2}, training=long, run={"silent_after_s": 6})
    assert [host.name for host in plan.hosts] == [hosts["head"], SECOND]

    def end_second(plan: Plan) -> None:
        for process in processes_of(hosts["nodes"][SECOND]):  # at once; Ray alone would let its instance run on
            process.kill()
        hosts["cluster"].remove_node(hosts["nodes"].pop(SECOND), allow_graceful=False)

    def cut_off_spare(plan: Plan) -> None:
        for process in processes_of(hosts["nodes"][SPARE]):
            process.suspend()

    told = run(plan, [(6, end_second), (14, cut_off_spare)])
    assert_undisturbed(plan, told, run(inline).sha256)
    assert [(loss.instance, loss.host, loss.kind) for loss in told.losses] == [
        (1, SECOND, "died"),
        (1, SPARE, "silent"),
    ]
    assert [repair.hosts for repair in told.repairs] == [(SPARE,), (hosts["head"],)]
