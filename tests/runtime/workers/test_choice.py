"""Which fleet `--fleet auto` chooses."""

from __future__ import annotations

import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest

from raypod.plan import tables
from raypod.plan.plan import Plan
from raypod.runtime.workers import ray_session
from raypod.runtime.workers.choice import fleet_for, with_fleet
from raypod.runtime.workers.inline import InlineFleet

ONE = {"num_instances": 1}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster runs on this host, whatever the other tests of this process have started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_session, "is_connected", lambda: False)


def test_one_instance_on_this_host_needs_no_ray(make: Callable[..., Plan]) -> None:
    plan = with_fleet(make(pod=ONE))
    assert plan.is_inline
    assert isinstance(fleet_for(plan, print), InlineFleet)
    assert plan.config.run.fleet == "auto"  # a resumed run, with other instances, chooses again
    for render in (tables.render, tables.render_brief):
        assert "in this process, without Ray: if it dies, --resume continues" in render(plan)
    assert with_fleet(make(pod={"replicas": 1})).is_inline
    assert with_fleet(make(pod=ONE, run={"max_restarts": 0})).is_inline
    with ThreadPoolExecutor(1) as pool:  # a training in a thread leaves the process to the others
        assert not pool.submit(lambda: with_fleet(make(pod=ONE)).is_inline).result()


@pytest.mark.parametrize(
    "sections",
    [
        {"pod": {}},
        {"run": {"fleet": "ray"}},
        {"run": {"snapshot_every": 4}},
        {"run": {"reset_command": "reset"}},
        {"run": {"max_restarts": 10}},
        {"run": {"stuck_after_s": 60}},
        {"pod": {**ONE, "bind_cores": True}},
        {"pod": {**ONE, "elastic": True}},
    ],
)
def test_several_instances_and_what_only_ray_has_need_ray(make: Callable[..., Plan], sections: Any) -> None:
    plan = with_fleet(make(**{"pod": ONE, **sections}))
    assert not plan.is_inline
    assert "without Ray" not in tables.render_brief(plan)


def test_ipus_with_an_sdk_need_ray(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not with_fleet(make(pod=ONE, run={"device": "ipu"})).is_inline
    emulated, found = (make(pod=ONE, run={"device": device}) for device in ("emulated", "auto"))
    (tmp_path / "poptorch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not with_fleet(found).is_inline
    assert with_fleet(emulated).is_inline
    monkeypatch.setenv("EMULATED_POD_CALL_S", "0.1")
    assert not with_fleet(emulated).is_inline


def test_a_cluster_needs_ray(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = make(pod=ONE)
    named = dataclasses.replace(plan.placement.cluster, is_local=False)
    on_pod = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, cluster=named))
    assert not with_fleet(on_pod).is_inline
    for address in ("10.0.0.1:6379", "no address"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert not with_fleet(plan).is_inline
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with socket.create_server(("127.0.0.1", 0)) as server:  # that of `ray start` on this host
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert not with_fleet(plan).is_inline
    assert with_fleet(plan).is_inline  # it has ended
    monkeypatch.setattr(ray_session, "is_connected", lambda: True)
    assert not with_fleet(plan).is_inline
