"""Failure detection from heartbeats: which instances are silent or stuck. Pure functions of the last heartbeats.

A process that ends is detected through its connection. The timeouts here are for a frozen process or an unreachable
host (`run.silent_after_s`), for an instance that responds but makes no progress (`run.stuck_after_s`), and for a
survivor that does not end its call after the loss of another instance (`run.stop_timeout_s`).

On an overloaded host every call takes longer. Therefore an instance whose threads use CPU time may take
`BUSY_FACTOR` times its timeout, in a call at most `run.report_timeout_s`: this limits an endless loop. So may all
instances if all wait for data at the same time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Iterable, List, Optional

from raypod.events import FailureKind, HeartbeatReport
from raypod.plan.sections import CALL_TIMEOUTS_S, RunSection
from raypod.runtime.worker.control import ATTACHING, IDLE, LOADING, RETRYING, SNAPSHOT
from raypod.system.activity_record import Activity

SLOWEST_CALL_FACTOR = 3.0  # a call may take this many times the slowest call so far
BUSY_FACTOR = 10.0
BUSY_SHARE = 0.02  # of a core; the CPU time between two heartbeats that counts as progress


@dataclasses.dataclass(frozen=True)
class LastHeartbeat:
    """The last heartbeat of an instance, and when it was received (monotonic seconds).

    `report` is None until the instance is built, which has its own timeout. `busy_s` is the last time at which the
    threads of the instance had used CPU time.
    """

    report: Optional[HeartbeatReport]
    received_s: float
    busy_s: float = -math.inf

    def next(self, report: Optional[HeartbeatReport], now_s: float) -> LastHeartbeat:
        """Return the heartbeat that follows this one.

        None after a report is an old reply, from before the instance was built. It must not replace the report: without
        one, an instance that freezes now would never be silent.
        """
        if report is None and self.report is not None:
            return self
        busy_s = self.busy_s
        if report is not None and self.report is not None:
            share = (report.cpu_s - self.report.cpu_s) / max(now_s - self.received_s, 1e-3)
            busy_s = now_s if share >= BUSY_SHARE else busy_s
        return LastHeartbeat(report, now_s, busy_s)


def heartbeat_of(index: int, activity: Activity) -> HeartbeatReport:
    """Return the heartbeat of an instance from its record. Whether it waits for others is not known."""
    name, duration_s, calls, slowest_call_s, cpu_s = activity
    return HeartbeatReport(index, name, duration_s, calls, slowest_call_s, waits_for_others=False, cpu_s=cpu_s)


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
    silent = _find_silent(heartbeats, now_s, bounds)
    if silent:
        return silent
    latest = (each.report for _, each in sorted(heartbeats.items()))
    training = [report for report in latest if report is not None and is_training(report)]
    bound_s = _stuck_bound_s(training, bounds)
    # If all load data, the cause is their disk: their replacement would lose the state, and wait for the disk, too.
    are_loading = all(report.activity == LOADING for report in training)
    late_s = _busy_bound_s(bound_s, bounds) if are_loading else bound_s
    late = [report for report in training if report.duration_s > max(late_s, _attach_bound_s(report, bounds))]
    if not late:
        return []
    if all(report.waits_for_others for report in training):
        fewest = min(report.calls for report in training)
        late = [report for report in late if report.calls == fewest]
    else:
        # Can be empty: the instance that does not wait reaches its own bound later.
        late = [
            report
            for report in late
            if not report.waits_for_others and not _may_continue(heartbeats[report.instance], bound_s, bounds)
        ]
    bounds_s = {report.instance: max(bound_s, _attach_bound_s(report, bounds)) for report in late}
    return [
        Suspect(report.instance, "stuck", _stuck_cause(report, bounds_s[report.instance], training, bounds))
        for report in late
    ]


def find_unreleased(
    heartbeats: Dict[int, LastHeartbeat], instances: Iterable[int], aborted_s: float, now_s: float, bounds: RunSection
) -> List[Suspect]:
    """Return those of `instances` that cannot continue after the loss of others.

    Their waits for other instances are aborted since `aborted_s`. One in a call ends that at the next such wait, so it
    has the timeout of a call, but not the long one of IPUs: without the others their call never ends. One that loads
    data or does anything else that needs no other instance, or is being built, has the timeout of that.
    """
    in_call = bounds.model_copy(update={"stuck_after_s": min(bounds.call_timeout_s, CALL_TIMEOUTS_S["emulated"])})
    suspects = []
    latest = {index: heartbeats[index] for index in sorted(instances) if heartbeats[index].report is not None}
    for index, last in latest.items():
        report, bound_s = last.report, bounds.stop_timeout_s
        assert report is not None
        if report.waits_for_others or report.activity == IDLE:
            late_s, end_s = now_s - max(aborted_s, last.busy_s), aborted_s + BUSY_FACTOR * bound_s
            if late_s > bound_s or now_s > end_s:
                cause = f"did not abort its collectives with the lost instances within {now_s - aborted_s:.1f} s"
                suspects.append(Suspect(index, "stuck", f"{cause} (run.stop_timeout_s = {bound_s:g})"))
        elif is_training(report):
            own = in_call if _is_in_call(report) else bounds
            bound_s = max(_stuck_bound_s([report], own), _attach_bound_s(report, own))
            if report.duration_s > bound_s and not _may_continue(last, bound_s, own):
                suspects.append(Suspect(index, "stuck", _stuck_cause(report, bound_s, [report], own)))
    return _find_silent(latest, now_s, bounds) or suspects


def _find_silent(heartbeats: Dict[int, LastHeartbeat], now_s: float, bounds: RunSection) -> List[Suspect]:
    return [
        Suspect(index, "silent", _silent_cause(each.report, now_s - each.received_s, bounds))
        for index, each in sorted(heartbeats.items())
        if each.report is not None and now_s - each.received_s > bounds.silent_after_s
    ]


def is_training(report: Optional[HeartbeatReport]) -> bool:
    """Return whether the instance runs a call, or what is between two calls. All else has its own timeout."""
    if report is None:
        return False
    return report.activity in (ATTACHING, LOADING, RETRYING, SNAPSHOT) or _is_in_call(report)


def _is_in_call(report: HeartbeatReport) -> bool:
    return report.activity.startswith("in call")


def _stuck_bound_s(reports: List[HeartbeatReport], bounds: RunSection) -> float:
    slowest = [report.slowest_call_s for report in reports]
    if not slowest or None in slowest:  # a first call includes the compilation
        return max(bounds.report_timeout_s, bounds.call_timeout_s)
    return max(bounds.call_timeout_s, SLOWEST_CALL_FACTOR * max(each for each in slowest if each is not None))


def _attach_bound_s(report: HeartbeatReport, bounds: RunSection) -> float:
    """Return the timeout of an instance that loads its program, which can take as long as in a first call; else 0."""
    return bounds.report_timeout_s if report.activity == ATTACHING and not report.waits_for_others else 0.0


def _busy_bound_s(bound_s: float, bounds: RunSection) -> float:
    return max(bound_s, min(BUSY_FACTOR * bound_s, bounds.report_timeout_s))


def _may_continue(last: LastHeartbeat, bound_s: float, bounds: RunSection) -> bool:
    """Return whether an instance whose call exceeds `bound_s` has used CPU time within that, and not too long.

    What it has used since its last heartbeat is unknown; one that comes late on a busy host has its own timeout.
    """
    assert last.report is not None
    return last.received_s - last.busy_s <= bound_s and last.report.duration_s <= _busy_bound_s(bound_s, bounds)


def _silent_cause(last: Optional[HeartbeatReport], silence_s: float, bounds: RunSection) -> str:
    activity = last.activity if last is not None else ""
    return (
        f"silent for {silence_s:.1f} s (run.silent_after_s = {bounds.silent_after_s:g}): its process is frozen, or its "
        f"host is unreachable; at its last heartbeat it was {activity}"
    )


def _stuck_cause(report: HeartbeatReport, bound_s: float, reports: List[HeartbeatReport], bounds: RunSection) -> str:
    if bound_s == bounds.call_timeout_s:
        bound = f"run.stuck_after_s = {bound_s:g}"
    elif any(each.slowest_call_s is None for each in reports):
        bound = f"run.report_timeout_s = {bound_s:g} limits a first call"
    elif bound_s == _attach_bound_s(report, bounds):
        bound = f"run.report_timeout_s = {bound_s:g}"
    else:
        bound = f"{SLOWEST_CALL_FACTOR:g} times the slowest call so far, {bound_s:.1f} s"
    busy_s = _busy_bound_s(bound_s, bounds)
    if report.duration_s > busy_s > bound_s:
        or_loading = " or all instances load data" if report.activity == LOADING else ""
        bound += f"; {busy_s:g} s while its threads use CPU time{or_loading}"
    return f"stuck: {report.activity} for {report.duration_s:.1f} s ({bound})"
