"""`raypod lr-range`: a short training whose learning rate grows, and the rate that its losses suggest."""

from __future__ import annotations

import csv
import io
import math
import statistics
import time
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from raypod.api import planning
from raypod.cli.table import COMMANDS
from raypod.errors import ConfigError, LossNotFinite
from raypod.events import UpdateDone
from raypod.plan.config import RANGE_TEST
from raypod.plan.layout import METRICS
from raypod.runs.run_folder import measured
from raypod.system.command_line import FlagParser, show, value_of
from raypod.system.files import replace_file

CURVE = "lr-range.csv"
_DEFAULTS = (("--learning-rate", "training.learning_rate", "10"), ("--updates", "training.updates", "100"))
_OWN = (("--lr-schedule", "training.lr_schedule"), ("--warmup-updates", "training.warmup_updates"))
_SMOOTHING = 0.8
_ROUNDING = 1e-9  # relative
_BELOW_LOWEST = 10  # the suggestion: where the loss is lowest, the training is about to diverge


class Point(NamedTuple):
    """A learning rate, the loss of the update with it, and the exponential mean of the losses until then."""

    learning_rate: float
    loss: float
    smoothed: float


def parser(words: Sequence[str] = ()) -> FlagParser:
    """Return the parser of a command line: the flags of `raypod train`, which parses them again."""
    return planning.parser(words, "raypod lr-range", ["--dry-run", "--take-over", "--quiet", "--verbose"])


def main(argv: Sequence[str]) -> int:
    """Train with a growing rate, write the curve into the run folder, and print the suggested rate."""
    _check(argv)
    parser(argv).parse_args(argv)
    run_dir = value_of(argv, "--run-dir", "run.run_dir") or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-lr-range"
    words = [*argv, "--lr-schedule", RANGE_TEST]
    for flag, key, default in (*_DEFAULTS, ("--run-dir", "run.run_dir", run_dir)):
        words += [] if value_of(argv, flag, key) is not None else [flag, default]
    try:
        code = COMMANDS["train"].run(words)
    except LossNotFinite:  # the end of the range
        code = 0
    if code == 0 and "--dry-run" not in argv:
        _finish(Path(run_dir))
    return code


def _check(argv: Sequence[str]) -> None:
    for flag, key in _OWN:
        if value_of(argv, flag, key) is not None:
            raise ConfigError(f"lr-range has a schedule of its own: omit {flag}")
    if value_of(argv, "--resume", "run.resume") is not None:
        raise ConfigError("lr-range begins at the first update: omit --resume; --init-weights takes a run's weights")
    for flag in ("--detach", "--detach-as"):
        if flag in argv:
            raise ConfigError(f"lr-range ends with its result: omit {flag}")


def _finish(run_dir: Path) -> None:
    """Write the curve, and print the result."""
    points = curve([(each.learning_rate, each.loss) for each in measured(UpdateDone, run_dir / METRICS)])
    file = io.StringIO()
    csv.writer(file).writerows([Point._fields, *points])
    replace_file(run_dir / CURVE, file.getvalue().encode())
    rate = suggested(points)
    tested = f"{points[0].learning_rate:.3g} to {points[-1].learning_rate:.3g}" if points else "none"
    result = (
        "no rate is suggested: the loss does not fall clearly; use more --updates, or another --learning-rate as the "
        "end of the range"
        if rate is None
        else f"the loss is lowest near {rate * _BELOW_LOWEST:.2g}: use a tenth, --learning-rate {rate:.2g}"
    )
    show(f"Learning rates with a finite loss: {tested}; {result}\nCurve: {run_dir / CURVE}")


def curve(updates: Sequence[Tuple[Any, Any]]) -> List[Point]:
    """Return the points of the updates (learning rate, loss), without losses that are not finite."""
    points: List[Point] = []
    mean = weight = 0.0
    for rate, loss in updates:
        if rate is not None and loss is not None and math.isfinite(loss):
            mean, weight = _SMOOTHING * mean + (1 - _SMOOTHING) * loss, _SMOOTHING * weight + 1 - _SMOOTHING
            points.append(Point(rate, loss, mean / weight))
    return points


def suggested(points: Sequence[Point]) -> Optional[float]:
    """Return a tenth of the rate at which the smoothed loss is lowest; None if the loss does not fall clearly.

    In the first quarter of the updates the rates are too low to change the loss: it shows how much the loss scatters.
    """
    beginning, others = points[: len(points) // 4], points[len(points) // 4 :]
    if len(beginning) < 2:
        return None
    losses = [each.loss for each in beginning]
    mean, lowest = statistics.mean(losses), min(others, key=lambda each: each.smoothed)
    # The smoothed loss scatters a third as much as the loss itself.
    falls = lowest.smoothed < mean - max(statistics.stdev(losses), _ROUNDING * abs(mean))
    return lowest.learning_rate / _BELOW_LOWEST if falls else None
