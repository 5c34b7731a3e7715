"""The process that starts, signals and ends the programs of one host for its actor; run as a script.

When its input closes for any reason (the actor was killed, its raylet died, Ray was stopped), it ends all programs:
SIGTERM to each process group, then SIGKILL to every descendant after a grace period. It is a child subreaper, so it
also finds processes that left their group or session. Each program is killed if the reaper dies.

One thread. The argument is the folder of psutil, the only package that it imports: without the others of `site` it
starts sooner. Input (JSON lines): first {"programs": [...], "grace_s": s}, then
{"signal": n} or {"end": grace_s}. Output (JSON lines): {"start": [index, pid]} for each program that starts, and
{"end": [index, exit code, cause]} for each one that exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in a shell
_KILL_S = 2.0  # bound for killed processes to disappear
_NOT_RESETTABLE = (signal.SIGKILL, signal.SIGSTOP)
_libc = ctypes.CDLL(None, use_errno=True)


class Reaper:
    """Runs programs until none of their descendants is left."""

    def __init__(self) -> None:
        self._running: Dict[int, int] = {}  # pid: index
        self._started: List[Any] = []  # Popen objects; a collected one would reap its process
        self._grace_s = 2.0
        self._ends_at_s: Optional[float] = None
        self._input = b""
        self._waker, waker = os.pipe()
        for end in (self._waker, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # only the input pipe ends this process
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("0")  # Ray raises the OOM score of its workers

    def run(self) -> None:
        """Process commands until the input closes or requests the end; then end all descendants."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while self._ends_at_s is None or (self._descendants() and time.monotonic() < self._ends_at_s):
                for key, _ in selector.select(0.05 if self._ends_at_s is not None else None):
                    if key.fd == 0 and not self._read_commands():
                        selector.unregister(0)
                        self._end(self._grace_s)
                    elif key.fd == self._waker:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._waker, 4096)
                self._reap()
        self._kill_all()

    def _read_commands(self) -> bool:
        """Execute the available commands; return False at the end of the input."""
        data = os.read(0, 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "programs" in command:
                self._grace_s = command["grace_s"]
                for program in command["programs"]:
                    self._start(program["index"], program)
            elif "signal" in command:
                self._signal(command["signal"])
            else:
                self._end(command["end"])
        return bool(data)

    def _start(self, index: int, program: Dict[str, Any]) -> None:
        try:
            started = subprocess.Popen(
                program["argv"],
                stdin=program["files"][0],
                stdout=program["files"][1],
                stderr=program["files"][2],
                env=program["environment"],
                cwd=program["working_dir"],
                start_new_session=True,
                preexec_fn=_child_setup(os.getpid(), program.get("cpus")),
            )
        except OSError as error:
            is_found = not isinstance(error, FileNotFoundError)
            cause = f"cannot start {error.filename or program['argv'][0]}: {error.strerror}"
            if not is_found and Path(program["working_dir"], program["argv"][0]).is_file():
                name = program["argv"][0]
                command = f"python {name}" if name.endswith(".py") else f"./{name}"
                cause = f"cannot start {name}: it is not on the PATH; run `{command}`"
            self._report_end(index, _NOT_EXECUTABLE if is_found else _NOT_FOUND, cause)
        except (ValueError, subprocess.SubprocessError) as error:
            self._report_end(index, _NOT_EXECUTABLE, f"cannot start {program['argv'][0]}: {error}")
        else:
            self._started.append(started)
            self._running[started.pid] = index
            self._report(start=[index, started.pid])
        finally:
            for file in set(program["files"]):  # otherwise the readers of these pipes get no end of file
                os.close(file)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._running:
                    index = self._running.pop(pid)
                    if os.WIFSIGNALED(status):
                        number = os.WTERMSIG(status)
                        self._report_end(index, 128 + number, f"killed by signal {number} ({_name(number)})")
                    else:
                        code = os.WEXITSTATUS(status)
                        self._report_end(index, code, f"exit code {code}")

    def _report_end(self, index: int, code: int, cause: str) -> None:
        self._report(end=[index, code, cause])

    def _report(self, **line: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader is gone; then the input closes, too
            os.write(1, json.dumps(line).encode() + b"\n")

    def _signal(self, number: int) -> None:
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)  # each program is the leader of its group

    def _end(self, grace_s: float) -> None:
        ends_at_s = time.monotonic() + grace_s
        if self._ends_at_s is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process handles SIGTERM only when it continues
            for pid in self._descendants():
                if pid not in self._running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
        self._ends_at_s = min(ends_at_s, self._ends_at_s or ends_at_s)

    def _kill_all(self) -> None:
        deadline = time.monotonic() + _KILL_S
        while time.monotonic() < deadline:
            left = self._descendants()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
            self._reap()

    def _descendants(self) -> List[int]:
        """Return the pids of all descendants that are not zombies, after reaping."""
        self._reap()
        children: Dict[int, List[int]] = {}
        for pid in psutil.pids():  # not `children` of psutil, which fails if one process of another user is hidden
            with contextlib.suppress(psutil.Error):  # it has ended
                found = psutil.Process(pid).as_dict(["ppid", "status"])
                if found["status"] != psutil.STATUS_ZOMBIE:
                    children.setdefault(found["ppid"], []).append(pid)
        descendants: List[int] = []
        queue = [os.getpid()]
        while queue:
            pids = children.get(queue.pop(), [])
            descendants += pids
            queue += pids
        return descendants


def _child_setup(reaper: int, cpus: Optional[List[int]]) -> Callable[[], None]:
    """Return the function that runs in a program's process before exec."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != reaper:  # it died before prctl took effect
            os._exit(1)
        for number in set(signal.Signals) - set(_NOT_RESETTABLE):
            signal.signal(number, signal.SIG_DFL)  # Ray ignores some signals, and children inherit that
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if cpus:
            os.sched_setaffinity(0, cpus)

    return prepare


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


if __name__ == "__main__":
    # Fork to leave the parent: when a worker exits, Ray kills its children but not their descendants.
    if os.fork() == 0:
        Reaper().run()
