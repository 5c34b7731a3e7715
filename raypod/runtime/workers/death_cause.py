"""The causes of the deaths of actors: Ray's reason, and the exception or fault in the log file of an instance."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any, Dict, Optional

from raypod.plan.plan import Plan
from raypod.runtime.worker.process import log_header
from raypod.runtime.workers.ray_nodes import alive_nodes
from raypod.runtime.workers.ray_reservation import node_affinity
from raypod.system.last_line import last_exception, last_fault

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
        node = _node_at(ray, _field(error, "ip")) if exceptions[index] is None else None
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


def _node_at(ray: Any, address: str) -> Optional[Dict[str, Any]]:
    return next((node for node in alive_nodes(ray) if node["NodeManagerAddress"] == address), None)


def _field(error: str, name: str) -> str:
    """Return a field of Ray's message about a dead actor; "" if Ray does not state it."""
    found = re.search(rf"^\s*{name}: (\S+)$", error, re.MULTILINE)
    return found.group(1) if found else ""
