"""The console output of a run, its remaining time, and the table at its end."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any, Callable, List, Tuple

import pytest

from raypod.events import (
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    Event,
    InstanceLost,
    InstanceWarned,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from raypod.plan.plan import Plan
from raypod.runs import progress
from raypod.runs.progress import NORMAL, QUIET, VERBOSE, Progress, RemainingTime, summary_table

Shown = Callable[..., "tuple[str, str]"]
UNKNOWN = {"loss": math.nan, "accuracy": math.nan}
STARTED = RunStarted("emulated", "emulated SDK on CPU (no poptorch here)", 44, 77754, ())
EPOCH = EpochDone(1, {"loss": 1.835, "accuracy": 32.3})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_the_output_does_not_end_the_run(shown: Shown) -> None:
    failed = CheckpointFailed(9, "runs/x/checkpoints/update-9", os.strerror(errno.ENOSPC), "")
    out, _ = shown(STARTED, failed, out=FullDisk())
    assert "cannot write the checkpoint" in out

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):  # its reader has ended: so does the command, as every other one
        shown(STARTED, out=Closed())


def update(number: int) -> UpdateDone:
    values = {"loss": 1.25, "accuracy": 50.0}
    return UpdateDone(number, (number - 1) // 44 + 1, values, number * 32, 1000.0, float(number))


def evaluation(update: int, accuracy: float, loss: float = 0.5) -> EvaluationDone:
    return EvaluationDone(360, {"loss": loss, "accuracy": accuracy}, update, update // 44)


@pytest.fixture
def shown(make: Callable[..., Plan]) -> Shown:
    """Show events on a terminal or in a pipe; return the content of stdout and stderr."""

    def show(*events: Any, err: Any = None, out: Any = None, detail: int = NORMAL, **run: Any) -> tuple[str, str]:
        out, err = out or io.StringIO(), err or io.StringIO()
        progress = Progress(make(training={"epochs": 2}, run=run), out, err, detail)
        for event in events:
            progress.on_event(event)
        progress.__exit__()
        return out.getvalue(), err.getvalue()

    return show


def test_a_resumed_bar_starts_inside_the_epoch_and_a_run_that_ends_inside_shows_its_last_update(shown: Shown) -> None:
    _, err = shown(*map(update, range(61, 89)), err=Terminal())
    assert "[Epoch 02]" in err
    assert "17/44" in err  # updates 45..60 were done before the resume
    assert "?it/s" not in err, "no bar without figures"
    assert "44/44" in err
    ended = RunEnded(20, False, "ab", None)
    assert "[Epoch 01, update 20] loss: 1.250, acc: 50.0" in shown(*map(update, range(1, 21)), ended)[0]
    assert ", update" not in shown(*map(update, range(1, 45)), EPOCH, ended)[0]
    out, _ = shown(update(20), EvaluationDone(360, {"loss": 1.0, "accuracy": 60.0}, 20, 1), update(21), ended)
    assert "update 20]" not in out  # an evaluation within the epoch is not the end of the run
    assert "[Epoch 01, update 21]" in out


def test_a_notebook_has_one_bar_for_the_run(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    class Notebook(io.StringIO):
        __module__ = "ipykernel.iostream"

    bars: list[Any] = []

    class Bar(progress.tqdm):  # type: ignore[misc,name-defined]
        def close(self) -> None:
            if self not in bars:
                bars.append(self)
            super().close()

    monkeypatch.setattr(progress, "tqdm", Bar)
    events = [*map(update, range(1, 45)), EPOCH, evaluation(44, 91.9), *map(update, range(45, 61)), update(50)]
    out, _ = shown(*events, err=Notebook())
    assert [(bar.total, bar.n, bar.desc) for bar in bars] == [(88, 50, "[Epoch 02]")]
    assert "[Epoch 01] loss: 1.835" in out


def test_without_a_terminal_plain_lines_are_printed_and_the_result_and_an_interruption(shown: Shown) -> None:
    assert shown(*map(update, range(1, 45)), EPOCH) == ("[Epoch 01] loss: 1.835, acc: 32.3\n", "")
    out, _ = shown(STARTED, evaluation(44, 91.94), evaluation(88, 98.61, 0.05), RunEnded(50, True, "ab", None))
    assert "emulated SDK on CPU (no poptorch here); 77,754 parameters in each instance, from update 44 on" in out
    assert "[Epoch 01] test loss: 0.500, test acc: 91.94\n" in out
    assert "Test accuracy: 98.61 % of 360 images (loss 0.050)" in out
    assert "Interrupted after update 50; continue with --resume" in out
    for ended, hint in (
        (RunEnded(0, True, "ab", None), "0; start it again: it has no checkpoint yet"),
        (RunEnded(50, True, "ab", "other/update-50"), "50; continue with --resume other/update-50"),
    ):
        assert f"Interrupted after update {hint}\n" in shown(ended)[0]


def test_a_warning_of_the_run_names_no_instance_and_an_unknown_loss_is_none(shown: Shown) -> None:
    assert shown(InstanceWarned(0, "the loss became nan", ""))[0] == "warning: the loss became nan\n"
    unknown = dataclasses.replace(update(3), metrics=UNKNOWN, missing_reports=(1,))
    out, err = shown(unknown, err=Terminal())
    assert out == ""
    assert "loss and acc unknown" in err
    _, err = shown(dataclasses.replace(update(1), learning_rate=0.0123456), err=Terminal())
    assert "acc=50.0, lr=0.0123, 1000 images/s" in err


def test_a_repair_names_the_damaged_checkpoints_and_a_resize_that_the_bits_differ(shown: Shown) -> None:
    damaged = ("checkpoints/update-00000012 is damaged: weights.safetensors has another sha256",)
    repaired = Repaired((0, 1), ("a", "b"), "checkpoints/update-00000006", 6, 2.0, 1, 2, damaged)
    warning, line = shown(repaired)[0].splitlines()
    assert warning == f"warning: {damaged[0]}"
    assert line.startswith("Repaired in 2.0 s: new instance 0 on a, instance 1 on b, with the state of checkpoints/")
    reset = dataclasses.replace(repaired, passed_over=(), reset_on=("a",))
    assert shown(reset)[0].startswith("Repaired in 2.0 s: devices reset on a, new instance 0 on a, instance 1 on b")
    assert shown(Resized(13, 1, 4, 4, ("a",), "host b is lost"))[0] == (
        "Elastic: 1 replica x accumulation 4 from update 14 on, instead of 4 replicas (host b is lost): every update "
        "has the same samples, but sums them in another order, so the bits of the weights differ\n"
    )


@pytest.mark.parametrize("columns", [160, 80, 60])
def test_the_bar_fits_into_the_terminal(shown: Shown, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, err = shown(*map(update, range(1, 45)), err=Terminal())
    lines = [line.strip() for line in err.split("\r") if " left" in line]
    assert lines[-1].startswith("[Epoch 01]")
    accuracy = "acc=50.0, " * (columns > 60)
    assert lines[-1].endswith(f"44/44, 00:44 left, loss=1.250, {accuracy}1000 images/s")
    assert max(map(len, lines)) <= columns
    assert ("|" in lines[-1]) == (columns > 60)


def test_lines_are_folded_to_the_terminal_but_not_for_a_pipe(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    piped, _ = shown(STARTED)
    assert len(piped.splitlines()) == 1
    folded, _ = shown(STARTED, out=Terminal())
    assert [line.startswith("  ") for line in folded.splitlines()] == [False, True]
    assert " ".join(folded.split()) == piped.strip()


def test_a_quiet_run_shows_what_went_wrong_and_the_result(shown: Shown) -> None:
    failed = CheckpointFailed(44, "checkpoints/b", "no space left", "checkpoints/a")
    events = [STARTED, *map(update, range(1, 45)), EPOCH, evaluation(44, 91.94), failed, evaluation(88, 98.61, 0.05)]
    out, err = shown(*events, err=Terminal(), detail=QUIET)
    warning, result = out.splitlines()
    assert warning.startswith("warning: cannot write the checkpoint checkpoints/b: no space left")
    assert (result, err) == ("Test accuracy: 98.61 % of 360 images (loss 0.050)", "")


def test_the_plan_begins_with_what_is_trained(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for detail in (QUIET, NORMAL, VERBOSE):
        out = io.StringIO()
        Progress(make(), out, io.StringIO(), detail).__enter__()
        shown[detail] = out.getvalue()
    assert shown[QUIET] == ""
    assert [line[:12].strip() for line in shown[NORMAL].splitlines()[:4]] == ["model", "data", "length", "global batch"]
    assert "instance  host" not in shown[NORMAL]
    assert "instance  host" in shown[VERBOSE]
    assert "python" in shown[VERBOSE].splitlines()[-2]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_only_where_wanted(shown: Shown, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    repaired = Repaired((0,), ("a",), "instance 1", 6, 2.0, 1, 2, ())
    assert "\x1b[32mRepaired in" in shown(repaired, out=Terminal())[0]
    assert "\x1b" not in shown(repaired, err=Terminal())[0]
    monkeypatch.setenv(variable, value)
    assert "\x1b" not in shown(repaired, out=Terminal())[0]


# ---- the table at the end --------------------------------------------------------------------------------------------


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
        return summary_table(plan, seconds, width)

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


def test_what_is_not_known_is_left_out_and_a_narrow_terminal_folds_texts(table: Callable[..., str]) -> None:
    text = table(7500, test_accuracy=None, seconds_to_first_update=None, samples_per_s=0.0, checkpoint=None)
    assert "accuracy" not in text
    assert "checkpoint" not in text
    assert "        time  2 h 5 min\n" in text
    assert "  throughput  not known: the first call is not timed\n" in text
    lines = table(131, 50).splitlines()
    assert max(map(len, lines)) <= 50
    assert "        time  2 min 11 s, 7.6 s of them until the" in lines
    assert "              first update" in lines


EVALUATION = EvaluationDone(360, {"loss": 1.0}, 0, 1)
LOST = InstanceLost(1, "h", "died", "its process died", "", "", "log")
REPAIRED = Repaired((1,), ("h",), "instance 0", 1, 100.0, 1, 2)
Pauses = Callable[[int], List[Tuple[Event, float]]]  # before an update: events, and the time that each takes


def nothing(update: int) -> List[Tuple[Event, float]]:
    return []


def left_of(
    total: int, call_s: Callable[[int], float], pauses: Pauses = nothing, first: int = 1, per_call: int = 1
) -> List[Tuple[float, float]]:
    """Run until the update `total`; return (shown, true) remaining times, of each update with both."""
    remaining, now_s, rows = RemainingTime(total, per_call), 7.0, []
    for update in range(first, total + 1):
        for event, seconds in pauses(update):
            remaining.add(event)
            now_s += seconds
        now_s += call_s(update) if (update - first) % per_call == 0 else 0.0
        remaining.add(UpdateDone(update, 1, {"loss": 1.0}, update, 1.0, now_s))
        rows.append((remaining.left_s, now_s))
    return [(left_s, now_s - at_s) for left_s, at_s in rows if left_s is not None]


@pytest.mark.parametrize(("first", "per_call"), [(1, 1), (61, 1), (1, 8)])
def test_a_steady_run_ends_when_it_is_shown(first: int, per_call: int) -> None:
    rows = left_of(160, lambda update: 0.5 if update > first else 30.0, first=first, per_call=per_call)
    assert len(rows) >= 160 - first - 2 * per_call
    assert all(left_s == pytest.approx(true_s) for left_s, true_s in rows)


def test_evaluations_repairs_and_a_slower_pace_cause_no_jumps() -> None:
    rows = left_of(440, lambda update: 1.0, lambda update: [(EVALUATION, 20.0)] if update % 44 == 1 < update else [])
    steps = [abs(after - before) for (before, _), (after, _) in zip(rows, rows[1:])]
    assert max(steps) < 0.25 * rows[0][0]
    assert all(left_s == pytest.approx(true_s, abs=30.0) for left_s, true_s in rows[132:])
    assert rows[-1] == (0.0, 0.0)
    rows = left_of(400, lambda update: 1.0, lambda update: [(LOST, 20.0), (REPAIRED, 80.0)] if update == 20 else [])
    assert [left_s for left_s, _ in rows] == pytest.approx([float(left) for left in range(398, -1, -1)])
    rows = left_of(2000, lambda update: 0.2 if update < 500 else 1.0)
    assert (rows[400][0], rows[900][0]) == (pytest.approx(0.2 * 1600, rel=0.02), pytest.approx(1100, rel=0.1))


@pytest.mark.parametrize(("slow", "most"), [(10, 2.5), (30, 1.5), (100, 1.2), (395, 1.0)])
def test_a_slow_call_does_not_multiply_the_remaining_time(slow: int, most: float) -> None:
    rows = left_of(400, lambda update: 20.0 if update == slow else 1.0)
    assert max(left_s for left_s, _ in rows) < most * 400
    after = [left_s / true_s for left_s, true_s in rows[slow + 100 :] if true_s > 0]
    assert all(0.8 < ratio < 1.4 for ratio in after)
