"""Launches in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launches import Launch, launcher, use_inline_ray


@pytest.fixture
def launch(
    processes: None, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Launch:
    """Run the command in this process on hosts of an InlineRay, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_inline_ray(monkeypatch)
    return launcher(capfdbinary)
