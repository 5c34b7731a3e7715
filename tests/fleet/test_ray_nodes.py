"""Tests of fleet/ray_nodes: nodes of hosts, and draining nodes."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from raypod.errors import ClusterError
from raypod.fleet import ray_nodes
from raypod.fleet.ray_nodes import draining_nodes, match_hosts
from raypod.plan.cluster import cluster_of
from raypod.plan.placement import Placement, Sizes, place


def own_node_is(node_id: str) -> SimpleNamespace:
    """Return a fake of Ray with two nodes."""
    nodes = [
        {"NodeID": f"id{number}", "Alive": True, "NodeManagerAddress": f"10.0.0.{number}", "Resources": {}}
        for number in (1, 2)
    ]
    context = SimpleNamespace(get_node_id=lambda: node_id)
    named = [{**node, "NodeManagerHostname": f"host{node['NodeManagerAddress'][-1]}"} for node in nodes]
    return SimpleNamespace(nodes=lambda: named, get_runtime_context=lambda: context)


def placed(hosts: str) -> Placement:
    return place(cluster_of(hosts), Sizes(2, 2, 1))


def test_localhost_in_a_list_is_the_node_of_this_process() -> None:
    found = match_hosts(own_node_is("id2"), placed("10.0.0.1,localhost"))
    assert [node["NodeID"] for node in found] == ["id1", "id2"]


@pytest.mark.parametrize("hosts", ["10.0.0.1,host1", "10.0.0.1,localhost"])
def test_two_names_of_one_host_are_rejected(hosts: str) -> None:
    with pytest.raises(ClusterError, match=f"{hosts.replace(',', ', ')} are names of one host; list it once"):
        match_hosts(own_node_is("id1"), placed(hosts))


@pytest.mark.parametrize("missing", ["module", "function"])
def test_a_ray_without_the_private_api_has_no_draining_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
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
