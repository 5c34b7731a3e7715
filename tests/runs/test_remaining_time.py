"""The remaining time of a run is near the true one, and moves gradually over evaluations, repairs and slow calls."""

from __future__ import annotations

from typing import Callable, List, Tuple

import pytest

from raypod.events import EvaluationDone, Event, InstanceLost, Repaired, UpdateDone
from raypod.runs.progress import RemainingTime

EVALUATION = EvaluationDone(360, {"loss": 1.0}, 0, 1)
LOST = InstanceLost(1, "h", "died", "its process died", "", "", "log")
REPAIRED = Repaired((1,), ("h",), "instance 0", 1, 100.0, 1, 2)

Pauses = Callable[[int], List[Tuple[Event, float]]]  # before an update: events, and the time that each takes


def nothing(update: int) -> List[Tuple[Event, float]]:
    return []


def shown(
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
    rows = shown(160, lambda update: 0.5 if update > first else 30.0, first=first, per_call=per_call)
    assert len(rows) >= 160 - first - 2 * per_call
    assert all(left_s == pytest.approx(true_s) for left_s, true_s in rows)


def test_evaluations_are_counted_without_jumps() -> None:
    rows = shown(440, lambda update: 1.0, lambda update: [(EVALUATION, 20.0)] if update % 44 == 1 < update else [])
    steps = [abs(after - before) for (before, _), (after, _) in zip(rows, rows[1:])]
    assert max(steps) < 0.25 * rows[0][0]
    assert all(left_s == pytest.approx(true_s, abs=30.0) for left_s, true_s in rows[132:])
    assert rows[-1] == (0.0, 0.0)


def test_a_repair_does_not_change_the_pace() -> None:
    rows = shown(400, lambda update: 1.0, lambda update: [(LOST, 20.0), (REPAIRED, 80.0)] if update == 20 else [])
    assert [left_s for left_s, _ in rows] == pytest.approx([float(left) for left in range(398, -1, -1)])


@pytest.mark.parametrize(("slow", "most"), [(10, 2.5), (30, 1.5), (100, 1.2), (395, 1.0)])
def test_a_slow_call_does_not_multiply_the_remaining_time(slow: int, most: float) -> None:
    rows = shown(400, lambda update: 20.0 if update == slow else 1.0)
    assert max(left_s for left_s, _ in rows) < most * 400
    after = [left_s / true_s for left_s, true_s in rows[slow + 100 :] if true_s > 0]
    assert all(0.8 < ratio < 1.4 for ratio in after)


def test_a_run_that_becomes_slower_is_followed() -> None:
    rows = shown(2000, lambda update: 0.2 if update < 500 else 1.0)
    assert rows[400][0] == pytest.approx(0.2 * 1600, rel=0.02)
    assert rows[900][0] == pytest.approx(1100, rel=0.1)
