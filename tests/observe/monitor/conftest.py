"""An own registry of running runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypod.observe.status import endpoint


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(endpoint.VARIABLE, str(tmp_path / "registry"))
