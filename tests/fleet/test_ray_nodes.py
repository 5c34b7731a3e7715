"""Draining nodes."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from raypod.fleet import ray_nodes
from raypod.fleet.ray_nodes import draining_nodes


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
