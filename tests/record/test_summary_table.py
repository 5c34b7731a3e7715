"""The table at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import pytest

from raypod.plan.plan import Plan
from raypod.record.summary_table import render

SUMMARY = {
    "test_accuracy": 99.44,
    "samples_per_s": 1190.4,
    "data_wait_share": 0.001,
    "seconds_to_first_update": 7.64,
    "restarts": 1,
    "checkpoint": "checkpoints/update-00000660",
}


@pytest.fixture
def table(make: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").touch()

    def of(seconds: float = 31.24, width: Any = None, **changes: Any) -> str:
        plan = make(run={"run_dir": str(tmp_path / "run")})
        (Path(plan.run_dir) / "summary.json").write_text(json.dumps({**SUMMARY, **changes}))
        return render(plan, seconds, width)

    return of


def test_the_table(table: Callable[..., str]) -> None:
    assert table().splitlines() == [
        "    accuracy  99.44 %",
        "        time  31.2 s, 7.6 s of them until the first update",
        "  throughput  1190 images/s; 0.1 % of the calls' time waiting for data",
        "    restarts  1",
        "  checkpoint  run/checkpoints/update-00000660",
        "      report  run/report.html",
        "  run folder  run",
    ]


def test_what_is_not_known_is_left_out(table: Callable[..., str]) -> None:
    text = table(7500, test_accuracy=None, seconds_to_first_update=None, samples_per_s=0.0, checkpoint=None)
    assert "accuracy" not in text
    assert "checkpoint" not in text
    assert "        time  2 h 5 min\n" in text
    assert "  throughput  not known: the first call is not timed\n" in text


def test_a_narrow_terminal_folds_texts(table: Callable[..., str]) -> None:
    lines = table(131, 50).splitlines()
    assert max(map(len, lines)) <= 50
    assert "        time  2 min 11 s, 7.6 s of them until the" in lines
    assert "              first update" in lines
