"""The cause of an instance's death contains the exception or the fault that its process wrote to the log file."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from raypod.plan.plan import Plan
from raypod.runtime.workers import ray_wait
from raypod.runtime.workers.ray_wait import death_reason, exception_in
from tests.support.scripted_ray import Ref, ScriptedRay, WorkerCrashed, node

OF_RAY = (
    "[2026 E 8 9] logging.cc:118: Unhandled exception: 1E. what(): new /a/_raylet.so(+0x18) [0x7f] ray::operator<<()"
)
OLD = "instance 1 of 2, pid 7: started on a\nterminate called after throwing an instance of 'E'\n  what():  old\n"
SIGSEGV = "*** SIGSEGV received at time=1795714240 on cpu 0 ***\nPC: @     0x7f6976985ad8  (unknown)  (unknown)\n"
FAULT = (
    "Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
    '  File "/a/ctypes/__init__.py", line 519 in string_at\n  File "/a/data.py", line 9 in __getitem__\n\n'
    "Extension modules: a._b (total: 1)\n"
)


@pytest.mark.parametrize(
    ("log", "exception"),
    [
        ("", None),
        (OLD, None),  # another process: the log of this one is on another host
        (f"{OLD}instance 1 of 2, pid 8: started on a\nx\n", ""),
        (f"{OLD}instance 1 of 2, pid 8: started on a\n{OF_RAY}\n/a.so(+0x18) [0x7f] f()\n", "what(): new"),
        (f"{OLD}instance 1 of 2, pid 8: started on a\n  what():  new:  gone\nAborted\n\udcff\n", "what(): new: gone"),
        (
            "instance 1 of 2, pid 8: a\nterminate called without an active exception\n",
            "terminate called without an active exception",
        ),
        (
            f"instance 1 of 2, pid 8: a\n{SIGSEGV}{FAULT}",
            "segmentation fault in string_at, /a/ctypes/__init__.py line 519",
        ),
        (
            f"instance 1 of 2, pid 8: a\n{FAULT.replace('Segmentation fault', 'Bus error')}",
            "bus error in string_at, /a/ctypes/__init__.py line 519: a memory-mapped file was truncated, or its disk "
            "is full or gone",
        ),
        (f"instance 1 of 2, pid 8: a\n{SIGSEGV}", "signal SIGSEGV"),
        ("instance 1 of 2, pid 8: a\n  what():  no\nFatal Python error: Aborted\n", "what(): no"),
    ],
)
def test_the_exception_is_that_of_the_process(tmp_path: Path, log: str, exception: str) -> None:
    (tmp_path / "log").write_bytes(log.encode(errors="surrogateescape"))
    assert exception_in(str(tmp_path / "log"), "instance 1 of 2, pid 8: ") == exception
    assert exception_in(str(tmp_path / "none"), "instance 1 of 2, pid 8: ") is None


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("RpcError: RPC error: Socket closed rpc_code: 14", "connection closed"),
        ("RpcError: RPC error: Deadline\n Exceeded rpc_code: 4", "RpcError: RPC error: Deadline Exceeded rpc_code: 4"),
    ],
)
def test_a_host_that_does_not_answer_is_described_in_plain_words(error: str, shown: str) -> None:
    message = f"The actor 0e02cb63ab is unavailable: {error}. The task may or may not have been executed on the actor."
    assert death_reason(message) == f"its process or its host does not answer ({shown})"


@pytest.mark.parametrize(
    "rest", ["", " Some common causes include: (1) killed", " There are some potential root causes. (1) SIGKILL (2)"]
)
def test_a_process_that_ended_without_a_message_is_described_in_plain_words(rest: str) -> None:
    detail = f"Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file.{rest}"
    message = f"The actor died unexpectedly before finishing this task.\n\tpid: 7\n{detail}"
    expected = "its process died: it ended without a message, as a process does that is killed or out of memory"
    assert death_reason(message) == expected


@pytest.mark.parametrize(
    ("exception", "cause"),
    [
        ("", "its process died: it ended without a message, as a process does that is killed or out of memory"),
        ("segmentation fault in f, a.py line 9", "its process died: it crashed (segmentation fault in f, a.py line 9)"),
        ("what(): no device", "its process died: it crashed (what(): no device)"),
    ],
)
def test_a_known_cause_replaces_what_ray_supposes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Plan], exception: str, cause: str
) -> None:
    monkeypatch.setattr(ray_wait, "exception_in", lambda log_file, header: exception)
    detail = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
    error = f"The actor died unexpectedly before finishing this task.\n\tpid: 7\n{detail}"
    assert ray_wait.death_causes(ScriptedRay(monkeypatch), make(), {1: error}) == {1: cause}


def test_a_host_on_which_no_process_starts_is_named(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Plan]) -> None:
    monkeypatch.setattr(ray_wait, "exception_in", lambda log_file, header: None)
    monkeypatch.setattr(ray_wait, "node_affinity", lambda node: {"node": node["NodeID"]})
    ray = ScriptedRay(monkeypatch, node("10.0.0.12"))
    ray.start = lambda options, *arguments: Ref(WorkerCrashed())
    detail = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
    error = f"The actor died unexpectedly before finishing this task.\n\tpid: 7\n\tip: 10.0.0.12\n{detail}"
    cause = "it crashed (the next process that Ray started there ended, too: is a disk of that host full?)"
    assert ray_wait.death_causes(ray, make(), {1: error}) == {1: f"its process died: {cause}"}
