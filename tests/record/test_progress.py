"""The console output of a run."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any, Callable

import pytest

from raypod.events import (
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from raypod.plan.plan import Plan
from raypod.record.progress import NORMAL, QUIET, VERBOSE, Progress

UNKNOWN = {"loss": math.nan, "accuracy": math.nan}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def update(number: int) -> UpdateDone:
    return UpdateDone(
        number, (number - 1) // 44 + 1, {"loss": 1.25, "accuracy": 50.0}, number * 32, 1000.0, float(number)
    )


@pytest.fixture
def shown(make: Callable[..., Plan]) -> Callable[..., tuple[str, str]]:
    """Show events; return the content of stdout and stderr."""

    def show(err: Any, *events: Any, out: Any = None, detail: int = NORMAL, **run: Any) -> tuple[str, str]:
        out = out or io.StringIO()
        progress = Progress(make(training={"epochs": 2}, run=run), out, err, detail)
        for event in events:
            progress.show(event)
        progress.close()
        return out.getvalue(), err.getvalue()

    return show


def test_a_terminal_shows_a_bar_of_the_updates_of_an_epoch(shown: Callable[..., Any]) -> None:
    _, err = shown(
        Terminal(), *(update(number) for number in range(1, 45)), EpochDone(1, {"loss": 1.25, "accuracy": 50.0})
    )
    assert "[Epoch 01]" in err
    assert "44/44" in err
    assert "loss=1.250, acc=50.0, 1000 images/s" in err


def test_a_resumed_bar_starts_inside_the_epoch(shown: Callable[..., Any]) -> None:
    _, err = shown(Terminal(), *(update(number) for number in range(61, 89)))
    assert "[Epoch 02]" in err
    assert "17/44" in err  # updates 45..60 were done before the resume
    assert "?it/s" not in err, "no bar without figures"
    assert "44/44" in err


def test_without_a_terminal_plain_lines_are_printed(shown: Callable[..., Any]) -> None:
    out, err = shown(
        io.StringIO(), *(update(number) for number in range(1, 45)), EpochDone(1, {"loss": 1.835, "accuracy": 32.3})
    )
    assert out == "[Epoch 01] loss: 1.835, acc: 32.3\n"
    assert err == ""


def test_the_result_and_an_interruption_are_printed(shown: Callable[..., Any]) -> None:
    started = RunStarted("emulated", "emulated SDK on CPU", 44, 77754, ())
    intermediate, last = (
        EvaluationDone(360, {"loss": loss, "accuracy": accuracy}, number, number // 44)
        for loss, accuracy, number in ((0.5, 91.94, 44), (0.05, 98.61, 88))
    )
    out, _ = shown(io.StringIO(), started, intermediate, last, RunEnded(50, True, "ab", None))
    assert "emulated SDK on CPU; 77,754 parameters in each instance, from update 44 on" in out
    assert "[Epoch 01] test loss: 0.500, test acc: 91.94\n" in out
    assert "Test accuracy: 98.61 % of 360 images (loss 0.050)" in out
    assert "Interrupted after update 50; continue with --resume" in out


def test_a_run_that_ends_within_an_epoch_shows_its_last_update(shown: Callable[..., Any]) -> None:
    ended = RunEnded(20, False, "ab", None)
    out, _ = shown(io.StringIO(), *map(update, range(1, 21)), ended)
    assert "[Epoch 01, update 20] loss: 1.250, acc: 50.0" in out
    out, _ = shown(io.StringIO(), *map(update, range(1, 45)), EpochDone(1, {"loss": 1.25, "accuracy": 50.0}), ended)
    assert ", update" not in out
    out, _ = shown(
        io.StringIO(), update(20), EvaluationDone(360, {"loss": 1.0, "accuracy": 60.0}, 20, 1), update(21), ended
    )
    assert "update 20]" not in out  # an evaluation within the epoch is not the end of the run
    assert "[Epoch 01, update 21]" in out


@pytest.mark.parametrize(
    ("on_nonfinite", "consequence"),
    [("stop", "the run stops"), ("continue", "the run continues (--on-nonfinite continue)")],
)
def test_a_nonfinite_loss_is_a_warning_with_its_consequence(
    shown: Callable[..., Any], on_nonfinite: str, consequence: str
) -> None:
    updates = [dataclasses.replace(update(number), metrics=UNKNOWN) for number in (3, 4)]
    out, _ = shown(io.StringIO(), *updates, on_nonfinite=on_nonfinite)
    assert out == f"warning: the loss became nan at update 3; {consequence}\n"


def test_unknown_results_are_no_warning(shown: Callable[..., Any]) -> None:
    unknown = dataclasses.replace(update(3), metrics=UNKNOWN, missing_reports=(1,))
    out, err = shown(Terminal(), unknown)
    assert out == ""
    assert "loss and acc unknown" in err


def test_a_repair_names_the_damaged_checkpoints(shown: Callable[..., Any]) -> None:
    damaged = ("checkpoints/update-00000012 is damaged: weights.safetensors has another sha256",)
    repaired = Repaired((0, 1), ("a", "b"), "checkpoints/update-00000006", 6, 2.0, 1, 2, damaged)
    warning, line = shown(io.StringIO(), repaired)[0].splitlines()
    assert warning == f"warning: {damaged[0]}"
    assert line.startswith("Repaired in 2.0 s: new instance 0 on a, instance 1 on b, with the state of checkpoints/")


def test_a_change_of_the_replicas_says_that_the_bits_differ(shown: Callable[..., Any]) -> None:
    (line,) = shown(io.StringIO(), Resized(13, 2, 4, 4, ("a",), "host b is lost"))[0].splitlines()
    assert line == (
        "Elastic: 2 replicas x accumulation 4 from update 14 on, instead of 4 replicas (host b is lost): every update "
        "has the same samples, but sums them in another order, so the bits of the weights differ"
    )


@pytest.mark.parametrize(
    ("columns", "figures"),
    [
        (160, "loss=1.250, acc=50.0, 1000 images/s"),
        (80, "loss=1.250, acc=50.0, 1000 images/s"),
        (60, "loss=1.250, 1000 images/s"),
    ],
)
def test_the_bar_fits_into_the_terminal(
    shown: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: int, figures: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, err = shown(Terminal(), *(update(number) for number in range(1, 45)))
    lines = [line.strip() for line in err.split("\r") if " left" in line]
    assert lines[-1].startswith("[Epoch 01]")
    assert lines[-1].endswith(f"44/44, 00:44 left, {figures}")
    assert max(map(len, lines)) <= columns
    assert ("|" in lines[-1]) == (columns > 60)


def test_lines_are_folded_to_the_terminal_but_not_for_a_pipe(
    shown: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    event = RunStarted("emulated", "emulated SDK on CPU (no poptorch here)", 0, 77754, ())
    piped, _ = shown(io.StringIO(), event)
    assert len(piped.splitlines()) == 1
    folded, _ = shown(io.StringIO(), event, out=Terminal())
    assert [line.startswith("  ") for line in folded.splitlines()] == [False, True]
    assert " ".join(folded.split()) == piped.strip()


def test_a_quiet_run_shows_what_went_wrong_and_the_result(shown: Callable[..., Any]) -> None:
    events = [
        RunStarted("emulated", "emulated SDK on CPU", 0, 77754, ()),
        *(update(number) for number in range(1, 45)),
        EpochDone(1, {"loss": 1.25, "accuracy": 50.0}),
        EvaluationDone(360, {"loss": 0.5, "accuracy": 91.94}, 44, 1),
        CheckpointFailed(44, "checkpoints/b", "no space left", "checkpoints/a"),
        EvaluationDone(360, {"loss": 0.05, "accuracy": 98.61}, 88, 2),
    ]
    out, err = shown(Terminal(), *events, detail=QUIET)
    warning, result = out.splitlines()
    assert warning.startswith("warning: cannot write the checkpoint checkpoints/b: no space left")
    assert result == "Test accuracy: 98.61 % of 360 images (loss 0.050)"
    assert err == ""


def test_the_plan_begins_with_what_is_trained(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for detail in (QUIET, NORMAL, VERBOSE):
        out = io.StringIO()
        Progress(make(), out, io.StringIO(), detail).begin()
        shown[detail] = out.getvalue()
    assert shown[QUIET] == ""
    assert [line[:12].strip() for line in shown[NORMAL].splitlines()[:4]] == ["model", "data", "length", "global batch"]
    assert "instance  host" not in shown[NORMAL]
    assert "instance  host" in shown[VERBOSE]
    assert "python" in shown[VERBOSE].splitlines()[-2]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_only_on_a_terminal_that_wants_them(
    shown: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    repaired = Repaired((0,), ("a",), "instance 1", 6, 2.0, 1, 2, ())
    assert "\x1b[32mRepaired in" in shown(io.StringIO(), repaired, out=Terminal())[0]
    assert "\x1b" not in shown(Terminal(), repaired)[0]
    monkeypatch.setenv(variable, value)
    assert "\x1b" not in shown(io.StringIO(), repaired, out=Terminal())[0]
