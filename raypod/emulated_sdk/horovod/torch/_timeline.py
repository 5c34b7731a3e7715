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
from typing import Any, BinaryIO, Dict, Optional, Sequence, Set, Tuple

from horovod.torch._agreement import Description
from horovod.torch._operations import Operation

_Row = Tuple[int, str]  # the id of a process set, and the key of an operation, which is unique in the set only


class Timeline:
    """Writes the events of this process's engines; does nothing between `stop` and `start`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: Optional[BinaryIO] = None
        self._marks_cycles = False
        self._start = 0
        self._pids: Dict[_Row, int] = {}
        self._open: Dict[_Row, Set[int]] = {}  # rows whose last event has not ended; the ranks that have submitted

    def start(self, path: str, mark_cycles: bool) -> None:
        """Write to a new file from now on; a warning if it cannot be opened. No effect while one is being written."""
        with self._lock:
            if self._file is not None:
                return
            try:
                self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115  # `stop` closes it
            except OSError as error:
                warnings.warn(f"the Horovod timeline is not written: {error}", stacklevel=3)
                return
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
            self._pids, self._open = {}, {}

    def mark_cycle(self) -> None:
        """Write a marker for a round of the engine, if asked for."""
        if self._file is not None and self._marks_cycles:
            with self._lock:
                self._write({"ph": "i", "name": "CYCLE_START", "s": "g"})

    def ready(self, process_set_id: int, description: Description, ranks: Sequence[int]) -> None:
        """Write that the ranks have submitted an operation."""
        if self._file is None:
            return
        row = process_set_id, description.key
        with self._lock:
            if row not in self._open:
                self._begin(row, f"NEGOTIATE_{description.kind}")
            for rank in sorted(set(ranks) - self._open[row]):
                self._open[row].add(rank)
                self._event(row, "X", str(rank), dur=0)

    def advance(self, process_set_id: int, operations: Sequence[Operation], is_running: bool) -> None:
        """Write that operations run now, which all ranks have submitted; else that they are complete or have failed."""
        if self._file is None:
            return
        with self._lock:
            for operation in operations:
                row = process_set_id, operation.description.key
                if self._open.pop(row, None) is not None:
                    self._event(row, "E")
                if is_running:
                    self._begin(row, operation.description.kind)

    def _begin(self, row: _Row, name: str) -> None:
        self._open[row] = set()
        self._event(row, "B", name)

    def _event(self, row: _Row, phase: str, name: Optional[str] = None, **more: Any) -> None:
        if row not in self._pids:
            self._pids[row] = pid = len(self._pids) + 1
            process_set_id, key = row
            shown = f"{key} (process set {process_set_id})" if process_set_id else key
            self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": shown}})
            self._write({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        named = {} if name is None else {"name": name}
        self._write({"ph": phase, **named, "pid": self._pids[row], **more})

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
