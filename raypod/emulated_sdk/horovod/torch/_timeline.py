"""The timeline: a file of events in Chrome's trace format, written by rank 0 (chrome://tracing, ui.perfetto.dev).

Each operation is a process of the trace. NEGOTIATE_<kind> lasts from its first submission until all ranks have
submitted it, with an event per rank; <kind> lasts while it runs. The file is valid JSON after every event.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any, BinaryIO, Dict, Optional, Sequence, Set

from horovod.torch._agreement import Description
from horovod.torch._operations import Operation


class Timeline:
    """Writes the events of this process's engines; does nothing between `stop` and `start`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Optional[BinaryIO] = None
        self._marks_cycles = False
        self._start = 0
        self._pids: Dict[str, int] = {}
        self._waiting: Dict[str, Set[int]] = {}  # ranks that have submitted an operation, until it runs
        self._running: Set[str] = set()

    def start(self, path: str, mark_cycles: bool) -> None:
        """Write to a new file from now on; OSError if it cannot be opened. No effect while a file is being written."""
        with self._lock:
            if self._file is not None:
                return
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  # `stop` closes it
            self._marks_cycles, self._start = mark_cycles, time.monotonic_ns()
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._file.write(b"[\n" + json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": epoch}).encode())
            self._file.write(b"]")

    def stop(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None
            self._pids, self._waiting, self._running = {}, {}, set()

    def mark_cycle(self) -> None:
        """Write a marker for a round of the engine, if asked for."""
        if self._file is not None and self._marks_cycles:
            with self._lock:
                self._write({"ph": "i", "name": "CYCLE_START", "s": "g"})

    def ready(self, description: Description, ranks: Sequence[int]) -> None:
        """Write that the ranks have submitted an operation."""
        if self._file is None:
            return
        with self._lock:
            if description.key not in self._waiting:
                self._waiting[description.key] = set()
                self._event(description.key, "B", f"NEGOTIATE_{description.kind}")
            for rank in sorted(set(ranks) - self._waiting[description.key]):
                self._waiting[description.key].add(rank)
                self._event(description.key, "X", str(rank), dur=0)

    def begin(self, operations: Sequence[Operation]) -> None:
        """Write that operations, which all ranks have submitted, run now."""
        if self._file is None:
            return
        with self._lock:
            for operation in operations:
                self._end_waiting(operation.description.key)
                self._running.add(operation.description.key)
                self._event(operation.description.key, "B", operation.description.kind)

    def end(self, operations: Sequence[Operation]) -> None:
        """Write that operations are complete or have failed."""
        if self._file is None:
            return
        with self._lock:
            for operation in operations:
                self._end_waiting(operation.description.key)
                if operation.description.key in self._running:
                    self._running.remove(operation.description.key)
                    self._event(operation.description.key, "E")

    def _end_waiting(self, key: str) -> None:
        if self._waiting.pop(key, None) is not None:
            self._event(key, "E")

    def _event(self, key: str, phase: str, name: Optional[str] = None, **more: Any) -> None:
        if key not in self._pids:
            self._pids[key] = pid = len(self._pids) + 1
            self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": key}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        named = {} if name is None else {"name": name}
        self._write({"ph": phase, **named, "pid": self._pids[key], **more})

    def _write(self, event: Dict[str, Any]) -> None:
        """Replace the closing bracket by the event and a new one."""
        if self._file is None:
            return  # stopped meanwhile
        event.setdefault("ts", (time.monotonic_ns() - self._start) // 1000)
        try:
            self._file.seek(-1, 1)
            self._file.write(f",\n{json.dumps(event)}]".encode())
        except OSError as error:
            warnings.warn(f"the Horovod timeline ends here: {error}", stacklevel=2)
            self._file.close()
            self._file = None
