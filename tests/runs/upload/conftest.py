"""A folder in place of a storage server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture(autouse=True)
def fsync_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can see what a loss of power leaves, and flushing takes most of the time on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
