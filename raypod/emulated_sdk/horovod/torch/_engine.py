"""The engine of a process set, a thread that runs the operations of this rank; their handles, and the timeline.

An operation is identified by its key. In each round the engines of all ranks exchange the keys that their programs
have submitted, and run those that all ranks have submitted: ranks may submit in any order. A round takes place when
every rank has a pending operation, so that an idle engine sends nothing.

If the ranks disagree about an operation, it fails on all ranks with the same error, and the others run. If no operation
can run and the programs of all ranks are waiting, all pending operations fail: no rank could make progress.

The engine numbers the ranks of its process set from 0; errors name the ranks among all.

The timeline is a file of events in Chrome's trace format, written by rank 0 (chrome://tracing, ui.perfetto.dev). Each
operation is a process of the trace. NEGOTIATE_<kind> lasts from its first submission until all ranks have submitted it,
with an event per rank; <kind> lasts while it runs. The file is valid JSON after every event.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from _pod import telemetry
from _pod.activation import GENERATION
from _pod.rendezvous import timeout_s
from _pod.wires import Group

from horovod.common.exceptions import HorovodInternalError
from horovod.torch._operations import (
    Allreduce,
    Description,
    Join,
    Operation,
    check_name,
    disagreement,
    join_error,
    run_together,
    settled,
)

_INLINE_BYTES = 2048  # of a rank's status in the first message; longer ones need a second message
_PAUSE_S = 0.001  # between rounds in which no operation could run
_GRACE_S = 5.0
SHUT_DOWN = "Horovod has been shut down, here or by a rank that has ended or failed"
DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently"
    " being processed. If you want to request another tensor, use a different tensor name."
)


class _Status(NamedTuple):
    """What one rank sends in a round."""

    has_joined: bool
    is_waiting: bool  # all threads that use the engine wait for an operation
    pending: Dict[str, Description]


class Numbering:
    """Numbers the operations of all engines of this process, in the order of their submission, as Horovod does.

    The number is the name of an unnamed operation: ranks must submit equally many operations before it.
    """

    def __init__(self) -> None:
        self.restart()

    def take(self) -> int:
        """Return the next number."""
        return next(self._numbers)  # atomic

    def restart(self) -> None:
        """Number from 0 again."""
        self._numbers = itertools.count()


class Engine:
    """Runs this rank's operations. Thread-safe."""

    def __init__(
        self, group: Group, process_set_id: int, ranks: Sequence[int], numbering: Numbering, timeline: Timeline
    ) -> None:
        """Start the thread. `ranks` are those of the process set among all ranks, sorted."""
        self.ranks = list(ranks)
        self._id = process_set_id
        self._group = group
        self._numbering = numbering
        self._timeline = timeline
        self._changed = threading.Condition()
        self._inline_round = threading.Lock()  # a single rank runs its rounds in the calling threads
        self._pending: Dict[str, Operation] = {}
        self._objects: Dict[str, int] = {}  # the number of objects by kind
        self._users: Set[threading.Thread] = set()
        self._waiting: Dict[threading.Thread, Operation] = {}
        self._joined: Set[int] = set()
        self._last_joined = -1
        self._ended = ""
        self._thread: Optional[threading.Thread] = None
        if group.size > 1:
            self._thread = threading.Thread(target=self._serve, name="horovod", daemon=True)
            self._thread.start()

    def submit(self, make: Callable[[str], Operation], kind: str, name: Optional[str]) -> Operation:
        """Start the operation that `make` constructs from its key.

        Raises:
            HorovodInternalError: the engine has ended.
            ValueError: an operation of that name is pending.
        """
        with self._changed:
            if self._ended:
                raise HorovodInternalError(self._ended)
            number = self._numbering.take()
            operation = make(f"{kind}.{name}" if name else f"{kind}.noname.{number}")
            key = operation.description.key
            if key in self._pending:
                raise ValueError(f"{DUPLICATE} [{key}]")
            self._pending[key] = operation
            self._users = {each for each in self._users if each.is_alive()} | {threading.current_thread()}
            self._timeline.ready(self._id, operation.description, [self.ranks[self._group.rank]])
            self._changed.notify_all()
        if self._thread is None:
            with self._inline_round:
                self._run_round()
        return operation

    def next_object(self, kind: str) -> str:
        """Return a text that only the next object of a kind has in this engine; it is equal on all ranks."""
        with self._changed:
            number = self._objects[kind] = self._objects.get(kind, 0) + 1
        return json.dumps([os.environ.get(GENERATION, "0"), self.ranks, kind, number])

    def wait(self, operation: Operation) -> Any:
        """Return the operation's result; HorovodInternalError if it fails or exceeds EMULATED_POD_TIMEOUT_S."""
        thread = threading.current_thread()
        wait_s = timeout_s() + _GRACE_S  # the group's own timeout comes first, with a more precise error
        with self._changed, telemetry.waiting():  # the engine's thread measures it
            self._waiting[thread] = operation
            self._changed.wait_for(lambda: operation.is_done, wait_s)
            del self._waiting[thread]
            if not operation.is_done:
                raise HorovodInternalError(f"waited {wait_s:g} s for {operation.description.key}")
        if operation.error is not None:
            raise HorovodInternalError(str(operation.error)) from operation.error
        return operation.result

    def close(self, reason: str = SHUT_DOWN) -> None:
        """End the thread; pending operations fail, here and on the other ranks."""
        with self._changed:
            is_busy = bool(self._pending)
            self._ended = self._ended or reason
            self._changed.notify_all()
        if self._thread is not None:
            if is_busy:
                self._group.abandon(reason)
            self._thread.join(_GRACE_S)

    def _serve(self) -> None:
        reason = SHUT_DOWN
        try:
            while self._wait_for_work():
                if not self._run_round():
                    time.sleep(_PAUSE_S)
        except RuntimeError as error:
            reason = str(error)
        finally:
            with self._changed:
                self._ended = self._ended or reason
            self._finish(self._unfinished(), RuntimeError(self._ended))

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._ended)
            return not self._ended

    def _run_round(self) -> bool:
        """Run one round with all ranks; return whether any operation was completed."""
        statuses = self._exchange(self._own_status())
        self._timeline.mark_cycle()
        self._update_joined(statuses)
        active = [rank for rank, status in enumerate(statuses) if not status.has_joined]
        if not active:
            self._complete_joins()
            return True
        ready = [key for key in statuses[active[0]].pending if all(key in statuses[rank].pending for rank in active)]
        self._run([self._checked(key, statuses, active) for key in ready])
        if not ready and all(status.is_waiting for status in statuses):
            calls = "; ".join(f"rank {rank}: {_calls(status)}" for rank, status in zip(self.ranks, statuses))
            error = RuntimeError(f"the ranks are out of step, they do not call the same: {calls}")
            own = [self._pending[key] for key in statuses[self._group.rank].pending]
            self._finish([operation for operation in own if not isinstance(operation, Join)], error)
            return True
        return bool(ready)

    def _own_status(self) -> _Status:
        with self._changed:
            pending = {key: operation.description for key, operation in self._pending.items()}
            has_joined = any(isinstance(operation, Join) for operation in self._pending.values())
            blocked = {thread for thread, operation in self._waiting.items() if not operation.is_done}
            is_waiting = all(thread in blocked or not thread.is_alive() for thread in self._users)
        return _Status(has_joined, is_waiting, pending)

    def _exchange(self, own: _Status) -> List[_Status]:
        """Return the status of all ranks, by rank."""
        if self._group.size == 1:
            return [own]
        content = json.dumps([own.has_joined, own.is_waiting, list(own.pending.values())]).encode()
        statuses = []
        for text in _gather_bytes(self._group, content):
            has_joined, is_waiting, pending = json.loads(text)
            statuses.append(_Status(has_joined, is_waiting, {each[0]: Description(*each) for each in pending}))
        return statuses

    def _update_joined(self, statuses: Sequence[_Status]) -> None:
        joined = {rank for rank, status in enumerate(statuses) if status.has_joined}
        if joined - self._joined:
            self._last_joined = max(joined - self._joined)
        self._joined = joined

    def _complete_joins(self) -> None:
        joins = [operation for operation in self._unfinished() if isinstance(operation, Join)]
        for operation in joins:
            operation.result = self._last_joined
        self._joined, self._last_joined = set(), -1
        self._numbering.restart()  # the ranks have submitted different numbers of operations
        self._finish(joins)

    def _checked(self, key: str, statuses: Sequence[_Status], active: Sequence[int]) -> Operation:
        """Return an operation that all active ranks have submitted; with its error if they disagree about it."""
        descriptions = settled({rank: each.pending[key] for rank, each in enumerate(statuses) if key in each.pending})
        first = descriptions[active[0]]
        operation = self._pending[key] if self._group.rank in descriptions else _of_joined_rank(first)
        operation.description = descriptions.get(self._group.rank, first)
        operation.owns = [descriptions[rank].own if rank in descriptions else [] for rank in range(len(statuses))]
        joined = [self.ranks[rank] for rank in range(len(statuses)) if rank not in descriptions]
        self._timeline.ready(self._id, first, [self.ranks[rank] for rank in descriptions])
        problem = disagreement({self.ranks[rank]: each for rank, each in descriptions.items()})
        if joined and first.kind != Allreduce.kind:
            problem = join_error(first.kind, joined)
        operation.error = RuntimeError(problem) if problem else None
        return operation

    def _run(self, operations: Sequence[Operation]) -> None:
        for operation in [each for each in operations if each.error is not None]:
            self._finish([operation], operation.error)
        valid = [operation for operation in operations if operation.error is None]
        for _, members in groupby(valid, key=lambda each: (each.kind, each.description.op, each.description.factors)):
            together = list(members)
            self._timeline.advance(self._id, together, is_running=True)
            fusable = [each for each in together if isinstance(each, Allreduce) and each.description.kind == each.kind]
            if fusable:
                run_together(self._group, fusable)
            for operation in together[len(fusable) :]:
                operation.run(self._group)
            self._finish(together)

    def _unfinished(self) -> List[Operation]:
        with self._changed:
            return list(self._pending.values())

    def _finish(self, operations: Sequence[Operation], error: Optional[Exception] = None) -> None:
        with self._changed:
            self._timeline.advance(self._id, operations, is_running=False)
            for operation in operations:
                operation.error, operation.is_done = error, True
                self._pending.pop(operation.description.key, None)
            self._changed.notify_all()


def _of_joined_rank(description: Description) -> Operation:
    """Return the operation by which a rank that has joined takes part in one of the others."""
    if description.kind == Allreduce.kind:
        return Allreduce.of_zeros(description)
    return Operation(description.key, description.tensors)


def _gather_bytes(group: Group, content: bytes) -> List[bytes]:
    """Return the bytes of all ranks, by rank; the lengths may differ."""
    row = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    head = len(content).to_bytes(8, "little") + content[:_INLINE_BYTES]
    row[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    table = group.gather(row)
    lengths = [int.from_bytes(bytes(other[:8].tolist()), "little") for other in table]
    rows = [other[8:] for other in table]
    if max(lengths) > _INLINE_BYTES:
        whole = torch.zeros(max(lengths), dtype=torch.uint8)
        whole[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = list(group.gather(whole))
    return [other[:length].numpy().tobytes() for other, length in zip(rows, lengths)]


def _calls(status: _Status) -> str:
    return "join" if status.has_joined else ", ".join(status.pending)


class _Submitted(NamedTuple):
    engine: Engine
    operation: Operation
    convert: Callable[[Any], Any]  # applied to the result


_submitted: Dict[int, _Submitted] = {}
_next_handle = itertools.count()
os.register_at_fork(after_in_child=_submitted.clear)  # a forked child has no engines


def submit(
    engine: Engine,
    kind: str,
    name: Optional[str],
    make: Callable[[str], Operation],
    convert: Callable[[Any], Any] = lambda result: result,
) -> int:
    """Start the operation that `make` constructs from its key; return its handle. `convert` is applied to the result.

    Raises:
        HorovodInternalError: Horovod has been shut down.
        TypeError: the name is no text.
        ValueError: an operation of that name is pending.
    """
    check_name(name)
    handle = next(_next_handle)
    _submitted[handle] = _Submitted(engine, engine.submit(make, kind, name), convert)
    return handle


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once; ValueError for a handle that is not pending."""
    if handle not in _submitted:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _submitted[handle].operation.is_done


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its tensor, or its tuple of tensors; None if the handle was used before.

    Raises:
        HorovodInternalError: the operation failed; on all ranks, if they disagree about it.
    """
    submitted = _submitted.pop(handle, None)
    return None if submitted is None else submitted.convert(submitted.engine.wait(submitted.operation))


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
