"""`raypod lr-range`."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import List

import pytest

from raypod.__main__ import main
from raypod.cli.lr_range import curve, factor, suggested

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny"]


def test_the_rate_grows_by_the_same_factor_and_a_tenth_of_the_best_one_is_suggested() -> None:
    rates = [10 * factor(update, 61) for update in range(61)]
    assert (rates[0], rates[30], rates[-1]) == pytest.approx((1e-5, 1e-2, 10.0))
    losses = [2.3 - 2 / (1 + math.exp(-4 * (math.log10(rate) + 2))) + (rate if rate > 1 else 0) for rate in rates]
    found = suggested(curve(list(zip(rates, losses))))
    assert found is not None
    lowest = rates[losses.index(min(losses))]
    assert lowest / 10 <= found <= lowest / 3  # smoothing delays it


def test_nothing_is_suggested_for_a_loss_that_does_not_fall() -> None:
    assert suggested(curve([(10.0**-update, 1.0) for update in range(20)])) is None
    assert suggested(curve([(0.1, math.nan), (None, 1.0), (0.2, 1.0)])) is None


def test_the_command_writes_the_curve_and_prints_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lr-range", *FLAGS, "--updates", "60", "--batch-size", "32", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 0
    *_, result, place = capsys.readouterr().out.splitlines()
    assert place == f"Curve: {tmp_path / 'run' / 'lr-range.csv'}"
    rows = list(csv.DictReader((tmp_path / "run" / "lr-range.csv").read_text().splitlines()))
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-5)
    assert float(rows[1]["learning_rate"]) == pytest.approx(1e-5 * 1e6 ** (1 / 59))
    rate = float(result.rpartition("--learning-rate ")[2])
    assert 1e-3 < rate < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr-schedule", "step"], "omit --lr-schedule"),
        (["--resume", "runs/x"], "lr-range begins at the first update: omit --resume"),
        (["run.resume=runs/x"], "lr-range begins at the first update: omit --resume"),
        (["--detach"], "omit --detach"),
        (["--updatse", "5"], "did you mean --updates?"),
    ],
)
def test_wrong_words_are_one_line(words: List[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lr-range", *FLAGS, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
