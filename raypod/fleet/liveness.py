"""Failure detection from heartbeats: which instances are silent or stuck. A pure function of the last heartbeats.

A process that ends is detected through its connection. The timeouts here are for a frozen process or an unreachable
host (`run.silent_after_s`), and for an instance that responds but makes no progress (`run.stuck_after_s`).
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional

from raypod.events import FailureKind, HeartbeatReport
from raypod.instance.control import LOADING
from raypod.plan.config import RunSection

SLOWEST_CALL_FACTOR = 3.0  # a call may take this many times the slowest call so far


@dataclasses.dataclass(frozen=True)
class LastHeartbeat:
    """The last heartbeat of an instance, and when it was received (monotonic seconds).

    `report` is None until the instance is built, which has its own timeout.
    """

    report: Optional[HeartbeatReport]
    received_s: float


@dataclasses.dataclass(frozen=True)
class Suspect:
    """An instance that is considered failed, and why."""

    instance: int
    kind: FailureKind  # "silent" or "stuck"
    cause: str


def find_suspects(heartbeats: Dict[int, LastHeartbeat], now_s: float, bounds: RunSection) -> List[Suspect]:
    """Return the instances that cause a lack of progress; none if all are within their bounds.

    If instances wait for each other too long, the cause is an instance that does not wait, else the one with the fewest
    calls. If all wait after the same number of calls, their connections failed: all instances are returned.
    """
    silent = [
        Suspect(index, "silent", _silent_cause(each.report, now_s - each.received_s, bounds))
        for index, each in sorted(heartbeats.items())
        if each.report is not None and now_s - each.received_s > bounds.silent_after_s
    ]
    if silent:
        return silent
    latest = (each.report for _, each in sorted(heartbeats.items()))
    training = [report for report in latest if report is not None and _is_training(report)]
    bound_s = _stuck_bound_s(training, bounds)
    late = [report for report in training if report.duration_s > bound_s]
    if not late:
        return []
    if all(report.waits_for_others for report in training):
        fewest = min(report.calls for report in training)
        late = [report for report in late if report.calls == fewest]
    else:
        # Can be empty: the instance that does not wait reaches its own bound later.
        late = [report for report in late if not report.waits_for_others]
    return [Suspect(report.instance, "stuck", _stuck_cause(report, bound_s, training, bounds)) for report in late]


def _is_training(report: HeartbeatReport) -> bool:
    """Return whether the instance runs a call. Everything else (saving, evaluating) has its own timeout."""
    return report.activity == LOADING or report.activity.startswith("in call")


def _stuck_bound_s(reports: List[HeartbeatReport], bounds: RunSection) -> float:
    slowest = [report.slowest_call_s for report in reports]
    if not slowest or None in slowest:  # a first call includes the compilation
        return max(bounds.report_timeout_s, bounds.stuck_after_s)
    return max(bounds.stuck_after_s, SLOWEST_CALL_FACTOR * max(each for each in slowest if each is not None))


def _silent_cause(last: HeartbeatReport, silence_s: float, bounds: RunSection) -> str:
    return (
        f"silent for {silence_s:.1f} s (run.silent_after_s = {bounds.silent_after_s:g}): its process is frozen, or its "
        f"host is unreachable; at its last heartbeat it was {last.activity}"
    )


def _stuck_cause(report: HeartbeatReport, bound_s: float, reports: List[HeartbeatReport], bounds: RunSection) -> str:
    if bound_s == bounds.stuck_after_s:
        bound = f"run.stuck_after_s = {bound_s:g}"
    elif any(each.slowest_call_s is None for each in reports):
        bound = f"run.report_timeout_s = {bound_s:g} limits a first call"
    else:
        bound = f"{SLOWEST_CALL_FACTOR:g} times the slowest call so far, {bound_s:.1f} s"
    return f"stuck: {report.activity} for {report.duration_s:.1f} s ({bound})"
