"""A profile as a trace in the JSON format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Processes of a trace are the coordinator and the processes of instances; their threads are rows of bars. Times are
microseconds since the start of the coordinator's process.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple

from raypod.events import Span

COORDINATOR = 1  # number of its process in a trace; those of instances follow
_LAST = 1000  # rows of threads with other names come after these
_ROWS = ("MainThread", "instance", "feed", "replica", "checkpoint")  # thread names begin with these; in this order


class Trace:
    """The events of a trace, with the numbers of its processes and threads."""

    def __init__(self, origin_s: float) -> None:
        """`origin_s` is the monotonic time of this host that is zero in the trace."""
        self.events: List[Dict[str, Any]] = []
        self._origin_s = origin_s
        self._threads: Dict[Tuple[int, str], int] = {}

    def add_process(self, process: int, name: str) -> None:
        """Name a process; they are shown in the order of their numbers."""
        self._name("process_name", process, 0, {"name": name})
        self._name("process_sort_index", process, 0, {"sort_index": process})

    def add_spans(self, process: int, spans: Iterable[Span], offset_s: float = 0.0) -> None:
        """Add bars; `offset_s` is the clock of the spans minus this host's."""
        for span in spans:
            self.events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.category,
                    "pid": process,
                    "tid": self._thread(process, span.thread),
                    "ts": self._microseconds(span.began_s - offset_s),
                    "dur": round(max(0.0, span.ended_s - span.began_s) * 1e6, 3),
                }
            )

    def add_instant(self, name: str, at_s: float, details: Dict[str, Any]) -> None:
        """Add a mark across the coordinator's rows."""
        row = self._thread(COORDINATOR, "events")
        mark = {"ph": "i", "s": "p", "name": name, "cat": "event", "pid": COORDINATOR, "tid": row, "args": details}
        self.events.append({**mark, "ts": self._microseconds(at_s)})

    def add_counter(self, name: str, at_s: float, value: float) -> None:
        """Add a point of a curve of the coordinator."""
        point = {"ph": "C", "name": name, "pid": COORDINATOR, "tid": 0, "args": {"value": value}}
        self.events.append({**point, "ts": self._microseconds(at_s)})

    def _microseconds(self, at_s: float) -> float:
        return round((at_s - self._origin_s) * 1e6, 3)

    def _thread(self, process: int, name: str) -> int:
        number = self._threads.get((process, name))
        if number is None:
            number = self._threads[process, name] = len(self._threads) + 1
            self._name("thread_name", process, number, {"name": name})
            starts = [index for index, start in enumerate(_ROWS) if name.startswith(start)]
            self._name("thread_sort_index", process, number, {"sort_index": min([*starts, _LAST])})
        return number

    def _name(self, kind: str, process: int, thread: int, values: Dict[str, Any]) -> None:
        self.events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values})


def merged(earlier: Dict[str, Any], later: Dict[str, Any]) -> Dict[str, Any]:
    """Return one trace of two processes of a run, the earlier of which was interrupted within the window.

    Both are contents of a profile. The clocks of the two coordinators are compared by their time of day.
    """
    before, after = earlier["metadata"], later["metadata"]
    shift_us = (after["parts"][0]["origin_unix_s"] - before["parts"][0]["origin_unix_s"]) * 1e6
    processes = max((event["pid"] for event in earlier["traceEvents"]), default=0)
    moved = [_moved(event, shift_us, processes) for event in later["traceEvents"]]
    metadata = {**after, "parts": [*before["parts"], *after["parts"]]}
    return {**later, "traceEvents": [*earlier["traceEvents"], *moved], "metadata": metadata}


def _moved(event: Dict[str, Any], shift_us: float, processes: int) -> Dict[str, Any]:
    moved = {**event, "pid": event["pid"] + processes}
    if "ts" in event:
        moved["ts"] = round(event["ts"] + shift_us, 3)
    if event["name"] == "process_sort_index":
        moved["args"] = {"sort_index": moved["pid"]}
    return moved


def in_sequence(steps: Sequence[Tuple[str, float]], began_s: float, thread: str) -> List[Span]:
    """Return consecutive steps (name, seconds) of a start as spans, the first of which began at `began_s`."""
    spans = []
    for name, seconds in steps:
        spans.append(Span(name, "start", began_s, began_s + seconds, thread))
        began_s += seconds
    return spans
