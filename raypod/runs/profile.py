"""`profile.json`: a trace of all processes of a run within a window of updates (`--profile`).

The instances send what they have recorded with their reports, so that nothing waits for the profile, and what an
instance did before it was lost is in it. It is written once: after the last call of the window, or at the end of a run
that ends before.

A profile as a trace in the JSON format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Processes of a trace are the coordinator and the processes of instances; their threads are rows of bars. Times are
microseconds since the start of the coordinator's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from raypod.errors import LeaseLost, RunError
from raypod.events import (
    CallDone,
    ClockReading,
    Event,
    PhaseBegun,
    ProcessSpans,
    Repaired,
    RunEnded,
    RunStarted,
    Span,
    UpdateDone,
)
from raypod.plan.layout import PROFILE
from raypod.plan.plan import Plan
from raypod.runs.callback import Callback
from raypod.runs.event_log import event_name, fields_of
from raypod.system.files import parse_json, replace_file, strict_json

_OF_INSTANCES = "in the instances: "  # begins the names of those steps in RunStarted.seconds
_PHASES = "phases"
_NO_CLOCK = "unknown: no reply; its times are those of its own clock"


@dataclasses.dataclass(frozen=True)
class ProfileSource:
    """How the profile asks the fleet: for the clocks, and for what is recorded after the last report."""

    clocks: Callable[[], Dict[int, ClockReading]]
    take: Callable[[], List[ProcessSpans]]


class ProfileWriter(Callback):
    """Collects the profile from the events of a run, and writes it. A context: its end writes what there is."""

    def __init__(
        self, plan: Plan, window: range, source: ProfileSource, warn: Callable[[str], None], started_at_s: float
    ) -> None:
        """`window` holds the 0-based updates; `started_at_s` is the monotonic time of the start of this process."""
        self._plan, self._window, self._source, self._warn = plan, window, source, warn
        self._origin_s, self._opened_s = started_at_s, time.monotonic()
        self._origin_unix_s = time.time() - (time.monotonic() - started_at_s)
        self._trace = Trace(started_at_s)
        self._processes: Dict[Tuple[int, int, str], List[ProcessSpans]] = {}  # by instance, pid and host
        self._clocks: Dict[Tuple[int, str], ClockReading] = {}  # the best of each instance and host
        self._hosts: Dict[int, str] = {}
        self._phase: Optional[Tuple[str, float]] = None
        self._start_seconds: Dict[str, float] = {}
        self._updates: List[int] = []
        # A call of the window is done; the last one is done, and its updates follow; the file is written.
        self._is_inside = self._is_complete = self._is_done = False
        self._collect: Dict[type, Callable[[Any, float], None]] = {
            RunStarted: self._start,
            PhaseBegun: lambda event, now_s: self._begin_phase(event.phase, now_s),
            CallDone: self._add_call,
            UpdateDone: self._add_update,
            Repaired: self._add_repair,
        }

    def on_event(self, event: Event) -> None:
        """Collect an event. Those after the window are ignored."""
        if self._is_complete and not self._is_done and not isinstance(event, UpdateDone):
            self._write()
        if self._is_done:
            return
        now_s = time.monotonic()
        collect = self._collect.get(type(event))
        if collect is not None:
            collect(event, now_s)
        elif self._is_inside:
            self._trace.add_instant(event_name(type(event)).replace("_", " "), now_s, fields_of(event))
        if isinstance(event, RunEnded):
            self._end(event)

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        if not self._is_done and self._is_inside and not isinstance(error, LeaseLost):
            self._write()

    def _start(self, event: RunStarted, now_s: float) -> None:
        self._hosts = {each.instance: each.host for each in event.instances}
        self._is_done = event.first_update >= self._window.stop  # resumed after the window
        self._start_seconds = dict(event.seconds)
        steps = [step for step in event.seconds if not step[0].startswith(_OF_INSTANCES)]
        before = [("start Python, plan the run", self._opened_s - self._origin_s)]
        begun_s = self._opened_s + sum(seconds for _, seconds in steps)
        after = [("set up the state and the weights", now_s - begun_s)]
        self._trace.add_process(COORDINATOR, "coordinator")
        self._trace.add_spans(COORDINATOR, in_sequence([*before, *steps, *after], self._origin_s, "start"))

    def _begin_phase(self, phase: Optional[str], now_s: float) -> None:
        before, self._phase = self._phase, (phase, now_s) if phase else None
        if before is not None and self._is_inside:
            self._trace.add_spans(COORDINATOR, [Span(before[0], "phase", before[1], now_s, _PHASES)])

    def _add_call(self, call: CallDone, now_s: float) -> None:
        if call.first_update not in self._window:
            return
        if not self._is_inside:
            self._is_inside = True
            self._read_clocks()
        self._add(call.profiles)
        is_last = call.first_update + self._plan.geometry.device_iterations >= self._window.stop
        self._is_complete = is_last and self._window.stop < self._plan.total_updates

    def _add_repair(self, event: Repaired, now_s: float) -> None:
        self._hosts = {each.instance: each.host for each in event.instances}
        if self._is_inside:
            self._trace.add_instant("repaired", now_s, fields_of(event))
            self._read_clocks()

    def _add(self, reports: Iterable[ProcessSpans]) -> None:
        for each in reports:
            self._processes.setdefault((each.instance, each.pid, each.host), []).append(each)

    def _add_update(self, event: UpdateDone, now_s: float) -> None:
        if event.update - 1 not in self._window:
            return
        self._updates.append(event.update)
        curves = {**(event.metrics if event.has_results else {}), "samples_per_s": event.samples_per_s}
        for name, value in curves.items():
            self._trace.add_counter(name, now_s, value)
        if self._is_complete and event.update == self._window.stop:
            self._write()

    def _end(self, event: RunEnded) -> None:
        """Take what followed the last update, if that is in the window, and write."""
        if event.updates >= self._window.start and self._window.stop == self._plan.total_updates:
            try:
                self._add([each for each in self._source.take() if each is not None])
            except RunError as error:  # the run has its result
                self._warn(f"the profile lacks the end of the run: {error}")
        if self._is_inside:
            self._write()

    def _read_clocks(self) -> None:
        for instance, reading in self._source.clocks().items():
            key = instance, self._hosts.get(instance, "")
            if key not in self._clocks or reading.error_s < self._clocks[key].error_s:
                self._clocks[key] = reading

    def _write(self) -> None:
        """Write the file; a failure is a warning."""
        self._is_done = True
        self._read_clocks()
        self._begin_phase(None, time.monotonic())
        path, content = Path(self._plan.run_dir) / PROFILE, self._content()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):  # there is no earlier part
            earlier = parse_json(path.read_bytes())
            if earlier["metadata"]["window"] == content["metadata"]["window"]:
                content = merged(earlier, content)
        try:
            replace_file(path, strict_json(content).encode())
        except OSError as error:
            self._warn(f"cannot write the profile {path}: {error.strerror or error}")
        self._processes.clear()
        self._trace.events.clear()

    def _content(self) -> Dict[str, Any]:
        clocks, dropped = [], 0
        for number, key in enumerate(sorted(self._processes), start=COORDINATOR + 1):
            instance, pid, host = key
            self._trace.add_process(number, f"instance {instance} on {host}, pid {pid}")
            reading = self._clocks.get((instance, host))
            for each in self._processes[key]:
                dropped += each.dropped
                self._trace.add_spans(number, each.spans, reading.offset_s if reading else 0.0)
            found = {"offset_s": reading.offset_s, "error_s": reading.error_s} if reading else {"error": _NO_CLOCK}
            clocks.append({"process": number, "instance": instance, "host": host, "pid": pid, **found})
        part = {
            "origin_unix_s": self._origin_unix_s,
            "updates": [min(self._updates), max(self._updates)] if self._updates else [],
            "start_seconds": self._start_seconds,
            "clocks": clocks,
            "dropped_spans": dropped,
        }
        if dropped:
            self._warn(f"the profile lacks {dropped} spans for which there was no space; choose fewer updates")
        window = [self._window.start + 1, self._window.stop]
        metadata = {"requested": self._plan.config.run.profile, "window": window, "parts": [part]}
        return {"traceEvents": self._trace.events, "displayTimeUnit": "ms", "metadata": metadata}


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
