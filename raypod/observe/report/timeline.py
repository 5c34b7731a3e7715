"""The timeline of a run: generations, phases, saves, faults, starts, and durations of calls, from `events.jsonl`.

Times are seconds since the first start of the run. The time between two processes of a run (it was interrupted, and
resumed later) is left out and listed among the gaps.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

from raypod.runs.call_times import STRAGGLER_RATIO, busy_ratios
from raypod.runs.event_text import MAIN, detail_of

_MAX_SPANS = 1500
_MAX_MARKS = 300  # of a kind
_ENDS = ("run_ended", "process_failed", "process_interrupted", "process_preempted")


class Timeline:
    """Folds the records of `events.jsonl`. Its size is bounded: spans that are too short to be seen are merged."""

    def __init__(self) -> None:
        self.generations: List[Dict[str, Any]] = []
        self.phase_s: Dict[str, float] = {}
        self._spans: List[List[Any]] = []  # [row, phase, begin, end, update]
        self._marks: Dict[str, List[List[Any]]] = {}  # by kind: [row, seconds, update, text]
        self._counts: Dict[str, int] = {}
        self._gaps: List[List[float]] = []
        self._origin_unix_s: Optional[float] = None
        self._shift_s = 0.0  # from the time since 1970 to that of the timeline
        self._last_s = 0.0
        self._open: Optional[List[Any]] = None
        self._saves: Dict[int, float] = {}  # begin of the checkpoints that are being written

    def handle(self, record: Dict[str, Any]) -> None:
        """Add a record of the log."""
        unix_s, name = record.get("unix_s"), record.get("event")
        if not isinstance(unix_s, (int, float)) or not math.isfinite(unix_s) or not isinstance(name, str):
            return
        if name == "process_started" or self._origin_unix_s is None:  # or the log begins in the middle
            self._begin_process(unix_s)
        at_s = self._last_s = max(self._last_s, unix_s - self._shift_s)
        update = record.get("update") if isinstance(record.get("update"), int) else None
        if name == "phase_begun":
            self._begin_phase(str(record.get("phase")), at_s, update)
        elif name == "run_started":
            self.generations[-1].update(
                generation=record.get("generation"), update=record.get("first_update"), ready_s=round(at_s, 3)
            )
        elif name == "checkpoint_begun" and update is not None:
            self._saves[update] = at_s
        elif name == "repaired":
            self._mark(name, at_s, update, detail_of(record))
            self._end_span(at_s)
            self._begin_row("repaired", record.get("generation"), at_s, update)
        elif name in MAIN and name != "process_started":
            self._mark(name, at_s, update, detail_of(record) + self._save_time(name, at_s, update))
        if name in _ENDS:
            self._end_span(at_s)

    def data(self, now_unix_s: Optional[float] = None) -> Dict[str, Any]:
        """Return the timeline as plain data; see `run_data`. `now_unix_s` is that of a run that is still running."""
        now_s = self._last_s
        if now_unix_s is not None and self._origin_unix_s is not None:
            now_s = max(now_s, now_unix_s - self._shift_s)
        spans, phase_s = list(self._spans), dict(self.phase_s)
        if self._open is not None:
            row, phase, begin_s, _, update = self._open
            spans.append([row, phase, begin_s, now_s, update])
            phase_s[phase] = phase_s.get(phase, 0.0) + now_s - begin_s
        marks = [[kind, *mark] for kind, found in self._marks.items() for mark in found]
        return {
            "origin_unix_s": self._origin_unix_s,
            "end_s": round(now_s, 3),
            "generations": self.generations,
            "spans": _rounded(_merged(spans, now_s)),
            "marks": _rounded(sorted(marks, key=lambda mark: mark[2])),
            "counts": self._counts,
            "gaps": self._gaps,
            "phase_s": {phase: round(seconds, 3) for phase, seconds in phase_s.items()},
        }

    def seconds_at(self, unix_s: float) -> float:
        """Return the time of a record of the current process on the timeline."""
        return max(0.0, unix_s - self._shift_s)

    def _begin_process(self, unix_s: float) -> None:
        if self._origin_unix_s is None:
            self._origin_unix_s = self._shift_s = unix_s
        else:
            gap_s = unix_s - self._shift_s - self._last_s
            self._end_span(self._last_s)
            self._gaps.append([round(self._last_s, 3), round(gap_s, 3)])
            self._shift_s += gap_s
        at_s = unix_s - self._shift_s
        self._begin_row("started" if not self.generations else "resumed", None, at_s, None)
        self._begin_phase("starting", at_s, None)

    def _begin_row(self, cause: str, generation: Any, at_s: float, update: Optional[int]) -> None:
        self.generations.append(
            {"cause": cause, "generation": generation, "begin_s": round(at_s, 3), "update": update, "ready_s": None}
        )

    def _begin_phase(self, phase: str, at_s: float, update: Optional[int]) -> None:
        self._end_span(at_s)
        self._open = [len(self.generations) - 1, phase, at_s, at_s, update]

    def _end_span(self, at_s: float) -> None:
        if self._open is None:
            return
        span, self._open = self._open, None
        span[3] = at_s
        self.phase_s[span[1]] = self.phase_s.get(span[1], 0.0) + at_s - span[2]
        self._spans.append(span)
        if len(self._spans) > 2 * _MAX_SPANS:
            self._spans = _merged(self._spans, at_s)

    def _save_time(self, name: str, at_s: float, update: Optional[int]) -> str:
        began_s = self._saves.pop(update, None) if name == "checkpoint_saved" and update is not None else None
        return "" if began_s is None else f", written in {at_s - began_s:.2g} s"

    def _mark(self, kind: str, at_s: float, update: Optional[int], text: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        found = self._marks.setdefault(kind, [])
        found.append([max(0, len(self.generations) - 1), at_s, update, text])
        if len(found) > 2 * _MAX_MARKS:
            del found[1:-1:2]  # every second one


def _merged(spans: List[List[Any]], total_s: float) -> List[List[Any]]:
    """Return the spans; if there are too many, those too short to be seen are added to the one before."""
    if len(spans) <= _MAX_SPANS:
        return spans
    least_s = 2 * total_s / _MAX_SPANS
    found: List[List[Any]] = []
    for span in spans:
        previous = found[-1] if found else None
        if (
            previous is not None
            and previous[0] == span[0]
            and (previous[1] == span[1] or previous[3] - previous[2] < least_s or span[3] - span[2] < least_s)
        ):
            longer = max(previous, span, key=lambda each: each[3] - each[2])
            found[-1] = [previous[0], longer[1], previous[2], span[3], previous[4]]
        else:
            found.append(list(span))
    return found


def _rounded(rows: List[List[Any]]) -> List[List[Any]]:
    return [[round(cell, 3) if isinstance(cell, float) else cell for cell in row] for row in rows]


_MAX_CELLS = 9000  # windows times instances
_LEAST_WINDOWS = 16
_MEANS = ("p50_s", "p95_s", "mean_s", "busy_s", "data_wait_share", "peer_wait_share")  # weighted with the calls
_SHOWN = ("p50_s", "p95_s", "slowest_s", "busy_s")  # of each window


class CallWindows:
    """Windows of the run, each with statistics of every instance. Neighbouring windows are merged if they are many."""

    def __init__(self) -> None:
        self._windows: List[Dict[str, Any]] = []

    def handle(self, record: Dict[str, Any], at_s: float) -> None:
        """Add a record `call_times` that was written `at_s` seconds after the start of the run."""
        found = [each for each in record.get("instances") or () if isinstance(each, dict) and "instance" in each]
        calls, first_update = record.get("calls"), record.get("first_update")
        if not found or not isinstance(calls, int) or calls < 1:
            return
        by_instance = {int(each["instance"]): each for each in found}
        self._windows.append({"end_s": at_s, "first_update": first_update, "calls": calls, "instances": by_instance})
        limit = max(_LEAST_WINDOWS, _MAX_CELLS // len(by_instance))
        if len(self._windows) > 2 * limit:
            self._windows = _halved(self._windows)

    def data(self) -> Optional[Dict[str, Any]]:
        """Return the windows and the totals as plain data; see `run_data`. None without calls."""
        if not self._windows:
            return None
        windows = self._windows
        instances = sorted({index for window in windows for index in window["instances"]})
        while len(windows) * len(instances) > _MAX_CELLS and len(windows) > _LEAST_WINDOWS:
            windows = _halved(windows)
        values = {
            name: [[_short(window["instances"].get(index, {}).get(name)) for window in windows] for index in instances]
            for name in _SHOWN
        }
        return {
            "straggler_ratio": STRAGGLER_RATIO,
            "instances": instances,
            "end_s": [round(window["end_s"], 3) for window in windows],
            "first_update": [window["first_update"] for window in windows],
            "calls": [window["calls"] for window in windows],
            **values,
            "totals": self._totals(instances),
        }

    def _totals(self, instances: List[int]) -> List[Dict[str, Any]]:
        """Return the statistics of each instance over the whole run, with `busy_ratio` and the calls."""
        whole = self._windows[0]
        for window in self._windows[1:]:
            whole = _joined(whole, window)
        found = [whole["instances"][index] for index in instances]
        ratios = busy_ratios({index: each.get("busy_s") for index, each in zip(instances, found)})
        return [
            {
                "instance": index,
                **{name: _short(each.get(name)) for name in (*_MEANS, "slowest_s")},
                "busy_ratio": _short(ratios.get(index)),
                "calls": each.get("calls", whole["calls"]),
            }
            for index, each in zip(instances, found)
        ]


def _halved(windows: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the windows with each pair joined."""
    return [_joined(*windows[index : index + 2]) for index in range(0, len(windows), 2)]


def _joined(first: Dict[str, Any], second: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    if second is None:
        return first
    instances: Dict[int, Dict[str, Any]] = {}
    for index in {*first["instances"], *second["instances"]}:
        parts = [
            (window["instances"][index], window["instances"][index].get("calls", window["calls"]))
            for window in (first, second)
            if index in window["instances"]
        ]
        instances[index] = {name: _weighted([(each.get(name), calls) for each, calls in parts]) for name in _MEANS}
        slowest = [each["slowest_s"] for each, _ in parts if isinstance(each.get("slowest_s"), (int, float))]
        instances[index]["slowest_s"] = max(slowest) if slowest else None
        instances[index]["calls"] = sum(calls for _, calls in parts)
    return {
        "end_s": second["end_s"],
        "first_update": first["first_update"],
        "calls": first["calls"] + second["calls"],
        "instances": instances,
    }


def _weighted(pairs: List[Any]) -> Optional[float]:
    known = [(value, weight) for value, weight in pairs if isinstance(value, (int, float))]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _short(value: Any) -> Optional[float]:
    return float(f"{value:.4g}") if isinstance(value, (int, float)) else None


STEP_OF_INSTANCES, PART_OF_IT = "start the instances", "in the instances: "
_MAX_STARTS = 40  # the first one and the newest ones


class Starts:
    """Folds the records of `events.jsonl` about starts and repairs."""

    def __init__(self) -> None:
        self.starts: List[Dict[str, Any]] = []
        self.facts: Dict[str, Any] = {"device": None, "device_line": None, "parameters": None, "raypod": None}
        self.has_summary = True  # that of the newest start: it has ended
        self._began_unix_s: Optional[float] = None
        self._instances: List[Dict[str, Any]] = []
        self._lost: Dict[int, int] = {}  # number of times, by instance

    def handle(self, record: Dict[str, Any]) -> None:
        """Add a record of the log."""
        name = record.get("event")
        if name == "process_started":
            self.has_summary = False
            self._began_unix_s = record.get("unix_s")
            self.facts["raypod"] = record.get("raypod", self.facts["raypod"])
        elif name == "run_started":
            self.facts.update({key: record.get(key) for key in ("device", "device_line", "parameters")})
            began_s = self._began_unix_s
            total_s = record["unix_s"] - began_s if began_s is not None and "unix_s" in record else None
            self._add(record, "resumed" if record.get("first_update") else "started", total_s, None)
        elif name == "run_ended":
            self.has_summary = True
        elif name == "repaired":
            self._add(record, "repaired", record.get("seconds"), record.get("lost"))
        elif name == "instance_lost" and isinstance(record.get("instance"), int):
            index = record["instance"]
            self._lost[index] = self._lost.get(index, 0) + 1

    def instances(self, planned: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
        """Return the instances of the newest generation, or the planned ones of a run that has not started."""
        actual = {each.get("instance"): each for each in self._instances}
        specs = {each.get("index"): each for each in planned}
        found = []
        for index in sorted({index for index in {*actual, *specs} if isinstance(index, int)}):
            started, spec = actual.get(index, {}), specs.get(index, {})
            replicas = [spec.get("replica_offset"), spec.get("local_replicas")]
            host = started.get("host") or spec.get("host")
            lost = self._lost.get(index, 0)
            found.append(
                {"instance": index, "host": host, "pid": started.get("pid"), "replicas": replicas, "lost": lost}
            )
        return found

    def versions(self) -> Dict[str, Dict[str, List[int]]]:
        """Return the instances that run each version of each package."""
        found: Dict[str, Dict[str, List[int]]] = {}
        for each in self._instances:
            versions = each.get("versions")
            for package, version in versions.items() if isinstance(versions, dict) else ():
                found.setdefault(str(package), {}).setdefault(str(version), []).append(each.get("instance", -1))
        return found

    def _add(self, record: Dict[str, Any], cause: str, total_s: Any, only: Any) -> None:
        instances = [each for each in record.get("instances") or () if isinstance(each, dict)]
        self._instances = instances or self._instances
        shown = [each for each in instances if not isinstance(only, list) or each.get("instance") in only]
        self.starts.append(
            {
                "generation": record.get("generation"),
                "cause": cause,
                "total_s": round(total_s, 3) if isinstance(total_s, (int, float)) else None,
                "steps": _with_parts_after_their_step(_steps(record.get("seconds"))),
                "instances": [[each.get("instance"), _steps(each.get("seconds"))] for each in shown],
            }
        )
        if len(self.starts) > _MAX_STARTS:
            del self.starts[1]


def _with_parts_after_their_step(steps: List[List[Any]]) -> List[List[Any]]:
    """Return the steps with those inside the instances after the step that contains them, if there is one."""
    parts = [step for step in steps if step[0].startswith(PART_OF_IT)]
    found: List[List[Any]] = []
    for step in steps:
        if step not in parts:
            found += [step, *parts] if step[0] == STEP_OF_INSTANCES else [step]
    return found if len(found) == len(steps) else steps


def _steps(seconds: Any) -> List[List[Any]]:
    """Return (name, seconds) of the steps of a start."""
    pairs = seconds.items() if isinstance(seconds, dict) else ()
    return [[str(name), round(value, 3)] for name, value in pairs if isinstance(value, (int, float))]
