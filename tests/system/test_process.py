"""An instance's process reuses the memory that it frees; the start time identifies a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, List, Optional

import pytest

from raypod.system.companion import end_session
from raypod.system.process import StepTimer, cpu_seconds, digest_of_modules, log_stream, process_start_ticks

PROGRAM = """
import resource, threading
from raypod.system import process

supported = process.keep_freed_memory() if {keep} else None
import torch  # noqa: E402


def step():
    activations = [torch.empty(2 << 20).fill_(1.0) for _ in range(12)]


def steps():
    for _ in range(16):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(supported, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def test_repeated_allocations_cause_fewer_page_faults(run_python: Callable[[str], str]) -> None:
    supported, kept = run_python(PROGRAM.format(keep=True)).split()
    if supported != "False":  # another C library
        assert 2 * int(kept) < int(run_python(PROGRAM.format(keep=False)).split()[1])


LARGE_PAGES = """
import re, threading
from pathlib import Path
from raypod.system import process

supported = process.keep_freed_memory()
ended = threading.Event()
for _ in range(3):
    threading.Thread(target=ended.wait).start()
import torch  # noqa: E402

kept = process.single_thread("instance").submit(torch.ones, 16 << 20).result()
address = kept.data_ptr()
for line in Path("/proc/self/smaps").read_text().splitlines():
    span = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*?(\\S*)$", line)
    if span:
        is_there = int(span[1], 16) <= address < int(span[2], 16)
        name = span[3]
    elif is_there and line.startswith("VmFlags"):
        print(supported, name, "hg" in line.split())
ended.set()
"""


def test_a_thread_beside_others_allocates_large_pages_of_the_heap(run_python: Callable[[str], str]) -> None:
    supported, name, is_advised = run_python(LARGE_PAGES).split()
    if supported != "False":  # another C library
        assert name == "[heap]"
        assert is_advised == str(Path("/sys/kernel/mm/transparent_hugepage").exists())


def test_a_process_has_start_ticks_until_it_is_reaped(processes: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    assert ticks is not None
    assert ticks >= (process_start_ticks(os.getpid()) or 0)
    child.communicate(b"\n", timeout=30)
    assert process_start_ticks(child.pid) is None


def test_the_end_of_a_session_does_not_reach_a_process_that_has_its_number_by_now(processes: None) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        awaited = subprocess.Popen(["true"], start_new_session=True)
        awaited.wait(timeout=30)
        awaited.pid = other.pid
        end_session(awaited)
        assert other.poll() is None
        end_session(other)
        assert other.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_killed_is_awaited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: List[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, how: killed.append(number))

    def wait(timeout: Optional[float] = None) -> None:
        assert timeout is not None
        raise subprocess.TimeoutExpired("mirror", timeout)

    process: Any = SimpleNamespace(stdin=None, returncode=None, pid=12345, wait=wait)  # in uninterruptible sleep
    end_session(process)
    assert killed == [12345]


def test_the_age_of_a_process_does_not_include_what_a_shell_did_before_exec(processes: None) -> None:
    code = "import time; from raypod.system.process import process_age_s; print(process_age_s(), time.time())"
    script = f"date +%s.%N; sleep 1; exec '{sys.executable}' -c '{code}'"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    begun_s, age_s, now_s = map(float, done.stdout.split())
    assert 0 < age_s < now_s - begun_s - 0.9


def test_consecutive_steps_are_measured_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    timer = StepTimer()
    for step, seconds in (("first", 1.0), ("second", 2.0)):
        now_s[0] += seconds
        timer.end(step)
    now_s[0] += 60.0
    timer.begin()
    now_s[0] += 3.0
    timer.end("after a break")
    assert timer.steps == [("first", 1.0), ("second", 2.0), ("after a break", 3.0)]


def test_the_cpu_time_of_threads_includes_their_child_processes(processes: None) -> None:
    assert cpu_seconds([2**22]) == 0.0  # no such thread
    this = threading.get_native_id()
    before_s = cpu_seconds([this])
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds([this]) - before_s > 0.25
        child.communicate(b"\n", timeout=30)


def test_a_log_on_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    for path, content in ((Path("/dev/full"), ""), (tmp_path / "log", "a line\n\xe9")):
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT)
        stream = log_stream(descriptor)
        print("a line", file=stream)
        stream.write("\xe9" + "x" * (1 << 16) * (not content))
        stream.flush()
        os.close(descriptor)
        assert not content or path.read_text() == content


def test_the_digest_of_modules_is_that_of_their_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = digest_of_modules(tmp_path)
    (tmp_path / ".#a.py").symlink_to("user@host.1")  # of an editor, for a file that is not saved
    (tmp_path / "lost.py").symlink_to("removed.py")
    (tmp_path / "a.txt").touch()
    assert digest_of_modules(tmp_path) == first
    (tmp_path / "b.py").touch()
    (tmp_path / "a.py").write_text("2")
    assert len({first, digest_of_modules(tmp_path)}) == 2


_GARBAGE_AT_A_FORK = """
import gc, os, sys
from raypod.runtime.worker import process
class Handle:
    def __del__(self):
        print("deleted by the", "parent" if os.getpid() == parent else "child", flush=True)
gc.disable()
parent, handle = os.getpid(), Handle()
handle.cycle = handle
del handle
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
gc.collect()
"""


def test_a_forked_child_does_not_delete_the_garbage_of_its_parent(run_python: Callable[[str], str]) -> None:
    """Handles of Ray in it would write to the connections of the parent."""
    assert run_python(_GARBAGE_AT_A_FORK).split("\n")[0] == "deleted by the parent"
