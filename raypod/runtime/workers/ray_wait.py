"""Take what Ray has ready, detect pauses of this process, and find the causes of the deaths of actors."""

from __future__ import annotations

import collections
import mmap
import re
import time
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from raypod.plan.plan import Plan
from raypod.runtime.worker.process import log_header
from raypod.runtime.workers.ray_nodes import alive_nodes
from raypod.runtime.workers.ray_reservation import node_affinity
from raypod.system.log_files import last_exception, last_fault

NO_VALUE = object()
_GATHER_S = 0.005  # the reports of a call arrive within a few milliseconds
_PAUSE_S = 2.0  # longer intervals between two polls are pauses
_KEPT_PAUSES = 100


class Arrival(NamedTuple):
    """A result, an item of a stream, or the end of either: one of `value` and `error` is set."""

    ref: Any
    value: Any  # NO_VALUE for the end of a stream, or with an error
    error: Optional[Exception]
    is_finished: bool  # nothing more arrives from `ref`


def take_ready(ray: Any, refs: Iterable[Any], within_s: float) -> List[Arrival]:
    """Return all results that are ready, and the next item of each stream that has one; wait for the first of them.

    Returns an empty list if nothing is ready within a time. `ray.wait` returns once a given number is ready, and its
    cost grows with the number of references. Therefore the second wait is not for the next one only.
    """
    waiting = list(refs)
    if not waiting or (within_s > 0 and not ray.wait(waiting, timeout=within_s)[0]):
        return []
    ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=min(within_s, _GATHER_S))
    return _take(ray, ready)


class PauseDetector:
    """Detects that this process did not poll: it was stopped, or blocked by its output. Others cannot be judged by it.

    While the process does not poll, replies wait to be read; if its whole host stands still, the other processes there
    do nothing either. Therefore timeouts do not count pauses. They count the first seconds of each, so that many
    pauses cannot keep a timeout from ending.
    """

    def __init__(self) -> None:
        self._polled_s = time.monotonic()
        # From when to when the time does not count.
        self._pauses: Deque[Tuple[float, float]] = collections.deque(maxlen=_KEPT_PAUSES)

    def poll(self) -> float:
        """Return the seconds since the previous poll that do not count; 0.0 if there was no pause."""
        now_s = time.monotonic()
        from_s, self._polled_s = self._polled_s + _PAUSE_S, now_s
        if now_s <= from_s:
            return 0.0
        self._pauses.append((from_s, now_s))
        return now_s - from_s

    def within(self, duration_s: float, now_s: float) -> float:
        """Return the seconds that do not count of the `duration_s` seconds before `now_s`."""
        since_s = now_s - duration_s
        return sum(max(0.0, to_s - max(from_s, since_s)) for from_s, to_s in self._pauses)


def _take(ray: Any, ready: Sequence[Any]) -> List[Arrival]:
    """Return one arrival of each reference."""
    items = []
    for ref in ready:
        try:
            items.append((ref, next(ref) if _is_stream(ref) else ref))
        except StopIteration:
            items.append((ref, None))
    values = iter(_get(ray, [item for _, item in items if item is not None]))
    arrivals = []
    for ref, item in items:
        value, error = next(values) if item is not None else (NO_VALUE, None)
        arrivals.append(Arrival(ref, value, error, item is None or error is not None or not _is_stream(ref)))
    return arrivals


def _is_stream(ref: Any) -> bool:
    return hasattr(ref, "__next__")


def _get(ray: Any, refs: List[Any]) -> List[Any]:
    """Return (value, error) of each reference. All are ready."""
    try:
        return [(value, None) for value in ray.get(refs)]
    except ray.exceptions.RayError:  # of the first reference that has one
        return [_get_one(ray, ref) for ref in refs]


def _get_one(ray: Any, ref: Any) -> Any:
    try:
        return ray.get(ref), None
    except ray.exceptions.RayError as error:
        return NO_VALUE, error


_TAIL_BYTES = 1 << 20  # of what a process wrote
_READ_S = 5.0  # for all log files that only other hosts can read
# What Ray reports of a process that ended without telling it, with possible causes.
_CONNECTION_LOST = re.compile(r"Worker unexpectedly exits with a connection error code \d+\. End of file\..*")
_WITHOUT_CAUSE = "it ended without a message, as a process does that is killed or out of memory"
_NOTHING_STARTS = "the next process that Ray started there ended, too: is a disk of that host full?"
_UNAVAILABLE = re.compile(
    r"The actor \w+ is unavailable: (.*?)\.? The task may or may not have been executed", re.DOTALL
)
_CLOSED = ("Socket closed", "Connection reset", "Connection refused")


def death_causes(ray: Any, plan: Plan, errors: Dict[int, str]) -> Dict[int, str]:
    """Return the cause of each death in one line. `errors` are Ray's messages about the dead actors, by instance."""
    exceptions: Dict[int, Optional[str]] = {}
    tasks: Dict[Any, int] = {}
    for index, error in errors.items():
        request = (plan.log_file(index), log_header(plan, index, _field(error, "pid")))
        exceptions[index] = exception_in(*request)
        alive = alive_nodes(ray) if exceptions[index] is None else ()
        node = next((each for each in alive if each["NodeManagerAddress"] == _field(error, "ip")), None)
        if node is not None:
            read = ray.remote(exception_in).options(**node_affinity(node), max_retries=0)
            tasks[read.remote(*request)] = index
    ready, late = ray.wait(list(tasks), num_returns=len(tasks), timeout=_READ_S) if tasks else ([], [])
    for task in late:
        ray.cancel(task, force=True)
    for task in ready:
        try:
            exceptions[tasks[task]] = ray.get(task)
        except ray.exceptions.WorkerCrashedError:
            exceptions[tasks[task]] = _NOTHING_STARTS
        except ray.exceptions.RayError:
            continue  # that host is lost, too
    reasons = {index: death_reason(error) for index, error in errors.items()}
    return {index: _with_exception(reason, exceptions[index]) for index, reason in reasons.items()}


def _with_exception(reason: str, exception: Optional[str]) -> str:
    """Return the cause of a death; what Ray can only suppose is left out if the exception is known."""
    return f"{reason.replace(_WITHOUT_CAUSE, 'it crashed')} ({exception})" if exception else reason


def death_reason(text: str) -> str:
    """Return the line of Ray's message with the reason of a death; the first line does not contain it."""
    lines = [line for line in text.splitlines() if line.strip()]
    unavailable = _UNAVAILABLE.match(text.strip())
    if unavailable:
        error = " ".join(unavailable.group(1).split())
        is_closed = any(each in error for each in _CLOSED)
        return f"its process or its host does not answer ({'connection closed' if is_closed else error})"
    if "creation task" in text:  # the constructor raised; its error is the last line
        return lines[-1]
    for marker in ("node has died", "Worker exit detail", "Worker exit type"):
        for line in lines:
            if marker in line:
                detail = line[line.index(marker) :].partition(" Some common causes")[0]
                detail = _CONNECTION_LOST.sub(_WITHOUT_CAUSE, detail)
                return f"its process died: {detail[len(marker) :].lstrip(': ') if 'exit' in marker else detail}"
    return lines[0]


def exception_in(log_file: str, header: str) -> Optional[str]:
    """Return the C++ exception or fault in a log file after the line `header`, with which a process begins its output.

    "" if there is none; None if the process did not write to this file, which is then on another host.
    """
    try:
        with Path(log_file).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin = content.rfind(header.encode())
            tail = content[max(begin, len(content) - _TAIL_BYTES) :] if begin >= 0 else None
    except (OSError, ValueError):  # ValueError: the file is empty
        return None
    if tail is None:
        return None
    text = tail.decode(errors="replace")
    return last_exception(text) or last_fault(text) or ""


def _field(error: str, name: str) -> str:
    """Return a field of Ray's message about a dead actor; "" if Ray does not state it."""
    found = re.search(rf"^\s*{name}: (\S+)$", error, re.MULTILINE)
    return found.group(1) if found else ""
