"""`events.jsonl`: a structured log of what happens in a run, for `raypod logs`, the report and the monitor.

Every line is a JSON object with `unix_s`, the time in seconds since 1970, `event`, and the fields of the event, as
docs/reference/events.md describes. The log is appended to over all starts of a run. It holds neither updates
(`metrics.jsonl`) nor single calls (`ledger.jsonl`), whose times are condensed into `call_times`.

The newest events of a run, in memory: many epochs and checkpoints do not displace a repair.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import re
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from raypod.errors import ConfigError, LeaseLost, RunError
from raypod.events import CallDone, CheckpointBegun, EvaluationDone, Event, UpdateDone
from raypod.plan.layout import EVENTS
from raypod.runs.call_times import CallTimesLog
from raypod.runs.callback import Callback
from raypod.runs.growing_file import parse_records
from raypod.runs.run_state import end_of
from raypod.system.files import AppendOnlyFile, strict_json
from raypod.system.signals import on_abort

_SYNC_INTERVAL_S = 60.0
_PAIRS = ("seconds", "versions")  # fields that hold (name, value) pairs if they are tuples; objects in JSON


class EventLog(Callback):
    """The event log of a run folder, open for appending.

    Its first line is `process_started`. It is flushed to disk with each checkpoint, and once per minute. Leaving the
    context by an error writes `process_failed`, or `process_interrupted` after a signal, or `process_preempted`.
    """

    def __init__(self, run_dir: Path, plan: Dict[str, Any], warn: Callable[[str], None] = lambda text: None) -> None:
        """`plan` are facts for the first line; `warn` gets one line when the disk begins to fail."""
        self._path, self._plan, self._warn = run_dir / EVENTS, plan, warn
        self._call_times = CallTimesLog()
        self._stack = contextlib.ExitStack()

    def on_event(self, event: Event) -> None:
        """Append an event, and the times of the calls before it if their window has ended."""
        if isinstance(event, UpdateDone):
            return
        times = self._call_times.handle(event)
        if times is not None:
            self._write("call_times", times)
        if not isinstance(event, CallDone):
            self._write(event_name(type(event)), fields_of(event))
        if isinstance(event, CheckpointBegun) or time.monotonic() - self._synced_s > _SYNC_INTERVAL_S:
            self._sync()

    def copy_to(self, folder: Path) -> None:
        """Copy the log into another run folder, with what its own disk does not take. OSError as from the disk."""
        self._file.copy_to(folder / EVENTS)

    def __enter__(self) -> EventLog:
        """Open the log. ConfigError if that fails."""
        try:
            self._file = AppendOnlyFile(self._path, self._warn)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}") from None
        self._file.end_line()
        installed = raypod_version()
        package = {"raypod": installed} if installed else {}
        self._write("process_started", {"pid": os.getpid(), "host": socket.gethostname(), **package, **self._plan})
        self._sync()
        self._stack.enter_context(on_abort(self._write_end))
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        self._stack.close()
        self._write_end(error)
        try:
            self._file.close()
        except OSError as failure:
            if error is None:
                raise RunError(f"cannot write all lines of {self._file.path}: {failure.strerror}") from None

    def _write_end(self, error: Optional[BaseException]) -> None:
        if isinstance(error, LeaseLost):  # another process has taken over the folder
            return
        times = self._call_times.end_window()
        if times is not None:
            self._write("call_times", times)
        if error is not None:
            state, exit_code, message = end_of(error)
            self._write(f"process_{state}", {"exit_code": exit_code, "message": message})

    def _sync(self) -> None:
        self._file.sync()
        self._synced_s = time.monotonic()

    def _write(self, name: str, fields: Dict[str, Any]) -> None:
        self._file.write_line(strict_json({"unix_s": round(time.time(), 3), "event": name, **fields}))


def restarts_in(run_dir: Path) -> int:
    """Return the number of repairs that the log of a run folder holds, over all starts of the run; 0 without a log."""
    restarts_of_starts = [0]
    for line in lines_with(run_dir / EVENTS, (b'"process_started"', b'"repaired"')):
        event, restarts = line.get("event"), line.get("restarts")
        if event == "process_started":
            restarts_of_starts.append(0)
        elif event == "repaired" and isinstance(restarts, int):  # it counts those since the start
            restarts_of_starts[-1] = restarts
    return sum(restarts_of_starts)


def lines_with(path: Path, words: Sequence[bytes]) -> Iterator[Dict[str, Any]]:
    """Yield the records of the lines that contain one of `words`; others are not parsed. Damaged lines are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if any(word in line for word in words):
                yield from parse_records([line])


def event_name(event_type: type) -> str:
    """Return the name of a type of event in the log, as in `checkpoint_saved`."""
    return _in_words(event_type.__name__)


@functools.lru_cache(maxsize=None)
def _in_words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def fields_of(event: Event) -> Dict[str, Any]:
    """Return the fields of an event as plain data, without the details of an evaluation, which have their own file."""
    if isinstance(event, EvaluationDone):
        event = dataclasses.replace(event, details=None)
    fields: Dict[str, Any] = _with_objects(dataclasses.asdict(event))
    fields.pop("details", None)
    return fields


def _with_objects(content: Any) -> Any:
    if isinstance(content, dict):
        return {
            key: dict(value) if key in _PAIRS and isinstance(value, tuple) else _with_objects(value)
            for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return [_with_objects(value) for value in content]
    return content


@functools.lru_cache(maxsize=None)
def raypod_version() -> Optional[str]:
    """Return the version of the installed package; None if it is run from a source folder."""
    try:
        return version("raypod")
    except PackageNotFoundError:
        return None


ROUTINE = frozenset(("epoch_done", "evaluation_done", "checkpoint_saved"))  # a healthy run has them again and again


class RecentEvents:
    """Keeps records as `events.jsonl` has them: the newest `most` of routine and the newest `most` of all others."""

    def __init__(self, most: int) -> None:
        self._count = 0
        self._routine: Deque[Tuple[int, Mapping[str, Any]]] = collections.deque(maxlen=most)
        self._others: Deque[Tuple[int, Mapping[str, Any]]] = collections.deque(maxlen=most)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the newest event."""
        kept = self._routine if record.get("event") in ROUTINE else self._others
        kept.append((self._count, record))
        self._count += 1

    def records(self) -> List[Dict[str, Any]]:
        """Return the kept records, oldest first. Any thread may call it: `list` copies a deque at once."""
        kept = sorted(list(self._routine) + list(self._others), key=lambda each: each[0])
        return [dict(record) for _, record in kept]
