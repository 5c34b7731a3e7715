"""For all tests of `record/`."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def fsync_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can see what a loss of power leaves, and flushing takes most of the time on a busy disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
