"""Early stopping: the decision, the end of a run, and its resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest

from raypod import train
from raypod.events import EvaluationDone, RunEnded, StoppedEarly
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import Plan
from raypod.runs import run_folder
from raypod.runs.metrics import line_of
from raypod.runtime.coordinator.stop import early_stop, first_stop
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.system.files import strict_json
from tests.support.scripted_runs import events_of, only

ACCURACY = Metric("accuracy", "higher")


def evaluations(metric: Metric, *values: float) -> List[EvaluationDone]:
    return [EvaluationDone(1, {metric.name: value}, 10 * (i + 1), i + 1) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "values", "stop", "best"),
    [
        (LOSS, (3, 2, 1), None, None),
        (LOSS, (3, 2, 2, 2), 40, 20),
        (LOSS, (3, 4, 2, 3, 2.5, 1), 50, 30),
        (ACCURACY, (3, 2, 1), 30, 10),
        (LOSS, (math.nan, math.nan, math.nan), 30, 10),
        (LOSS, (math.nan, 3, math.nan, 4), 40, 20),
    ],
)
def test_the_first_point_without_improvement_ends_the_run(
    metric: Metric, values: List[float], stop: Optional[int], best: Optional[int]
) -> None:
    done = evaluations(metric, *values)
    for order in (done, done[::-1]):
        found = first_stop(metric, 2, order)
        assert (found and found.update, found and found.best_update) == (stop, best)


@pytest.mark.parametrize("metric", [LOSS, ACCURACY])
def test_infinite_values_count_as_those_that_a_resumed_run_reads(metric: Metric, tmp_path: Path) -> None:
    done, path = evaluations(metric, math.inf, math.nan, -math.inf, 3, math.inf, 2, 4), tmp_path / "evaluations.jsonl"
    path.write_text("".join(f"{strict_json(line_of(each))}\n" for each in done))
    read = run_folder.measured(EvaluationDone, path)
    for patience in range(1, 7):
        found, expected = first_stop(metric, patience, done), first_stop(metric, patience, read)
        assert str(found) == str(expected)  # NaN is not equal to itself


def test_a_run_ends_early_with_a_checkpoint(make: Callable[..., Plan]) -> None:
    plan = make(training={"epochs": 9, "evaluate_every": 1, "early_stopping": "2 evaluations"})
    events = events_of(plan, ScriptedFleet(plan))
    stopped, ended = only(events[-2:-1], StoppedEarly), only(events[-1:], RunEnded)
    assert stopped.update == ended.updates == 3 * plan.updates_per_epoch
    assert (stopped.best_update, ended.interrupted) == (plan.updates_per_epoch, False)


def test_the_evaluation_at_the_end_of_an_earlier_part_does_not_count(make: Callable[..., Plan]) -> None:
    plan = make(training={"epochs": 9, "evaluate_every": 1, "early_stopping": "1 evaluation"})
    done = [EvaluationDone(1, {"loss": 1.0, "accuracy": 5.0}, update, 1) for update in (3, plan.updates_per_epoch)]
    assert early_stop(plan, done) is None


def command(folder: Path, *flags: str) -> int:
    inline = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--batch-size", "64"]
    return train.main([*inline, "--run-dir", str(folder), "--learning-rate", "1e-9", *flags])


def summary_of(folder: Path) -> Dict[str, Any]:
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def test_a_resumed_run_stops_at_the_same_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--evaluate-every", "1", "--lr-schedule", "constant"]
    flags += ["--early-stopping", "2 evaluations", "--early-stopping-metric", "accuracy", "--best-metric", "loss"]
    assert command(tmp_path / "whole", *flags, "--updates", "45") == 0
    whole = summary_of(tmp_path / "whole")
    assert whole["updates"] == whole["stopped_early"]["update"] == 15  # 3 epochs: the accuracy does not change
    assert not whole["interrupted"]
    out = capsys.readouterr().out
    assert "Stopped early after update 15: accuracy has not improved for 2 evaluations; the best is " in out
    assert whole["stopped_early"]["reason"] in out

    assert command(tmp_path / "part", *flags, "--updates", "8") == 0
    assert command(tmp_path / "rest", *flags, "--updates", "45", "--resume", str(tmp_path / "part")) == 0
    rest = summary_of(tmp_path / "rest")
    assert (rest["weights_sha256"], rest["stopped_early"]) == (whole["weights_sha256"], whole["stopped_early"])
    assert [each["update"] for each in rest["evaluations"]] == [5, 8, 10, 15]

    capsys.readouterr()
    assert command(tmp_path / "whole", "--resume", str(tmp_path / "whole")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the run has stopped early after update 15: accuracy has not improved for 2 evaluations" in line
    assert command(tmp_path / "whole", "--resume", str(tmp_path / "whole"), "--early-stopping", "3 evaluations") == 0
    assert summary_of(tmp_path / "whole")["updates"] == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--early-stopping", "2 epochs"], "write a number of evaluations: 5 evaluations"),
        (["--early-stopping", "0 evaluations"], "must be at least 1 evaluation"),
        (["--early-stopping", "2 evaluations"], "needs evaluations during the run: add --evaluate-every 1"),
        (["--early-stopping-metric", "loss"], "--early-stopping-metric has no effect without --early-stopping"),
        (["--best-metric", "perplexity"], "--best-metric perplexity: the task measures loss, accuracy"),
    ],
)
def test_a_wrong_setting_is_one_line(
    flags: List[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "run", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
