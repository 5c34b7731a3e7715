"""The timeline of a run: its generations, phases, saves, evaluations, faults and repairs, from `events.jsonl`.

Times are seconds since the first start of the run. The time between two processes of a run (it was interrupted, and
resumed later) is left out and listed among the gaps.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

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
