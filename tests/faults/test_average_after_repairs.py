"""Killed instances of a run with `--ema`: the average of an undisturbed run in one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome, plan_for, run, send

from raypod.events import RunEnded

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def hashes(outcome: Outcome) -> Any:
    (ended,) = outcome.of(RunEnded)
    return ended.weights_sha256, ended.ema_sha256


def test_the_average_after_two_repairs(session: Any, tmp_path: Path) -> None:
    training = {"ema": 0.9, "updates": 16}
    inline = plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, training=training)
    plan = plan_for(tmp_path / "ray", pod={"num_instances": 2}, training=training)
    outcome = run(plan, [(4, send(signal.SIGKILL, 0)), (9, send(signal.SIGKILL, 1))])
    assert [repair.seeded_from for repair in outcome.repairs] == ["instance 1", "instance 0"]
    assert hashes(outcome) == hashes(run(inline))
