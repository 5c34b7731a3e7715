"""The console output of a run."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any, Callable

import pytest

from raypod.events import EpochDone, EvaluationDone, Repaired, Resized, RunEnded, RunStarted, UpdateDone
from raypod.plan.plan import Plan
from raypod.record.progress import Progress

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

    def show(err: Any, *events: Any, **run: Any) -> tuple[str, str]:
        out = io.StringIO()
        progress = Progress(make(training={"epochs": 2}, run=run), out, err)
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
    assert "16/44" in err  # updates 45..60 were done before the resume
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
    assert "emulated SDK on CPU; 77,754 parameters, the same in all instances, from update 44 on" in out
    assert "[Epoch 01] test loss: 0.500, test acc: 91.94\n" in out
    assert "Test accuracy: 98.61 % of 360 images (loss 0.050)" in out
    assert "Interrupted after update 50; continue with --resume" in out


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
