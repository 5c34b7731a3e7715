"""A process beside a run, as the mirror or a tracker: the coordinator's side, which starts and ends it, and its own.

It is a process, not a thread: libraries take the interpreter's lock, can hang, and keep memory. Nothing that it does or
fails to do stops or slows the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, ClassVar, Deque, Dict, Generic, Iterator, List, Optional, Sequence, TypeVar

from typing_extensions import Protocol

import raypod
from raypod.system.files import file_lock, held, make_folder, open_to_append, parse_json, replace_file
from raypod.system.redaction import Redaction, redacted_output
from raypod.system.retries import awaited

NOT_AGAIN = 76  # exit code of a process that is not started again
_RESTART_S = (1.0, 5.0, 30.0, 60.0)  # between starts of a process that has died; the last one repeats
_LOOK_S = 1.0
_KILLED_S = 10.0  # for a process that was killed to end
_MOST_LINES = 100  # that a process has not taken
_LOCK_MARGIN_S = 10.0

S = TypeVar("S", bound="State")


class State(Protocol):
    """What a process remembers in a file, as JSON: a frozen dataclass with defaults."""

    __dataclass_fields__: ClassVar[Dict[str, Any]]

    @property
    def error(self) -> str:
        """Why the process fails at the moment."""

    def at_start(self: S) -> S:
        """Return the state with which a new start of the run begins."""


@dataclasses.dataclass
class Companion(Generic[S]):
    """The process of a run, as its coordinator starts and ends it. All of its failures cost one warning."""

    folder: Path  # of the run
    kind: str
    name: str  # what it is, in the warning
    module: str
    arguments: Sequence[str]  # after the run folder
    timeout_s: float  # for the rest, once the run has ended
    setting: str  # the flag of that
    state_file: str
    log_file: str
    state: S  # which the process has remembered last
    show: Callable[[str], None]
    print_line: Callable[[str], None]
    seconds_left: Callable[[], Optional[float]]  # until the process of the run must end; None for no limit
    has_warned: bool = False
    process: Optional[subprocess.Popen[bytes]] = None
    started_s: float = 0.0
    _starts: int = 0
    _looked_s: float = 0.0
    _until_s: float = 0.0
    limit_s: float = 0.0  # for the rest, once the run has ended, and the flag that sets it
    limit: str = ""

    def start(self) -> None:
        """Start the process with what that of an earlier start of the run has remembered."""
        path = self.folder / self.state_file
        self.state = read_state(path, self.state).at_start()
        try:
            make_folder(path.parent)
            make_folder((self.folder / self.log_file).parent)
            write_state(path, self.state)
        except OSError as error:
            self.warn(f"cannot be used: {error.strerror or error}")
        else:
            self._start_process()

    def send(self, line: str) -> None:
        """Write a line to the process, unless the pipe is full or closed."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self.process.stdin.fileno(), f"{line}\n".encode())

    def look(self) -> None:
        """Warn about a failure, and start a process again that has died, at most once per second."""
        now_s = time.monotonic()
        if self.process is None or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s, has_died = now_s, self._has_died()
        self.state = read_state(self.folder / self.state_file, self.state)
        error = self.state.error or ("its process ends repeatedly" if has_died and self._starts > 1 else "")
        if error:
            self.warn(f"fails: {error}; the run continues, and the {self.kind} tries again")
        if has_died and now_s - self.started_s > _RESTART_S[min(self._starts, len(_RESTART_S)) - 1]:
            self._start_process()

    def begin_end(self, *lines: str) -> None:
        """End the input of the process with `lines`; it is started once more for the rest if it has died."""
        if self._has_died():
            self._start_process()
        for line in lines:
            self.send(line)
        left_s = self.seconds_left()
        self.limit_s, self.limit = self.timeout_s, f"{self.setting} {self.timeout_s:g}"
        if left_s is not None and left_s < self.timeout_s:
            self.limit_s, self.limit = max(0.0, left_s), "--preemption-grace-s"
        self._until_s = time.monotonic() + self.limit_s
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def is_complete(self) -> bool:
        """Await the process until its time is over, with a line; return whether it has done everything.

        Before an enforced end of the run, a process that has not ended continues without the run, within its timeout.
        What it remembers does not tell: that of an earlier start may have ended meanwhile.
        """
        limit = f"{self.limit_s:.3g} s at most; Ctrl-C ends the wait"
        wait = f"waiting until {self.name} has the rest of the run ({limit})"
        is_done = awaited(self._has_ended, self._until_s - time.monotonic(), lambda: self.print_line(wait))
        self.state = read_state(self.folder / self.state_file, self.state)
        if not is_done and self.limit_s < self.timeout_s:
            self._leave()
        return self.process is not None and self.process.poll() == 0

    def kill(self) -> None:
        """End the process, whatever it does."""
        process, self.process = self.process, None
        if process is not None:
            end_session(process)

    def _leave(self) -> None:
        """Let the process do the rest within its timeout, as it does when the coordinator is killed."""
        if self.process is not None:
            self.process.returncode = 0  # prevents Popen's ResourceWarning: the process continues on purpose
            self.process = None

    def warn(self, text: str) -> None:
        """Show a warning, unless there was one."""
        if not self.has_warned:
            self.has_warned = True
            self.show(f"{self.name} {text}; see {self.log_file} in the run folder")

    def _has_ended(self) -> bool:
        self.look()
        return self.process is None or self.process.poll() is not None

    def _has_died(self) -> bool:
        """Return whether the process has ended before its input; an outage is no reason for that."""
        process = self.process
        is_open = process is not None and process.stdin is not None and not process.stdin.closed
        return process is not None and is_open and process.poll() not in (None, NOT_AGAIN)

    def _start_process(self) -> None:
        self.kill()
        self.started_s, self._starts = time.monotonic(), self._starts + 1
        arguments = [str(self.folder.resolve()), *self.arguments, f"--timeout-s={self.timeout_s}"]
        try:
            self.process = start_module(self.module, arguments, self.folder / self.log_file)
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)
        except OSError as error:
            self.warn(f"cannot be used: its process cannot be started: {error.strerror or error}")


class Input:
    """The lines that the process gets; once the run, or its coordinator, `has_ended`, it lives for the timeout."""

    def __init__(self, timeout_s: float) -> None:
        self.has_ended, self._timeout_s = False, timeout_s
        self._lines: Deque[str] = deque(maxlen=_MOST_LINES)
        self._is_new = threading.Event()
        threading.Thread(target=self._listen, name="input", daemon=True).start()

    def take(self) -> List[str]:
        """Return the lines since the last call."""
        self._is_new.clear()
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def wait(self, timeout_s: float) -> None:
        """Wait for a line or the end; after the end for the time, at most a second."""
        self._is_new.wait(min(timeout_s, 1.0) if self.has_ended else timeout_s)

    def _listen(self) -> None:
        for line in sys.stdin:
            self._lines.append(line.strip())
            self._is_new.set()
        timer = threading.Timer(self._timeout_s, _end_all)
        timer.daemon = True
        timer.start()
        self.has_ended = True
        self._is_new.set()


class SavedState(Generic[S]):
    """The file of what this process remembers. `state` is newer than the file while that cannot be written."""

    def __init__(self, path: Path, new: S) -> None:
        """`new` is the state without a readable file."""
        self._path = path
        self.state = self._written = read_state(path, new)

    def remember(self, **changed: Any) -> None:
        """Replace fields of the state."""
        self.state = dataclasses.replace(self.state, **changed)
        if self.state != self._written:
            with contextlib.suppress(OSError):  # a full or lost disk
                write_state(self._path, self.state)
                self._written = self.state


def read_state(path: Path, new: S) -> S:
    """Return the content of the file of a state; `new` without a readable one."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        content = parse_json(path.read_text()).items()
        return type(new)(**{name: tuple(value) if isinstance(value, list) else value for name, value in content})
    return new


def write_state(path: Path, state: State) -> None:
    """Replace the file of a state. OSError if it cannot be written."""
    replace_file(path, (json.dumps(dataclasses.asdict(state)) + "\n").encode())


@contextlib.contextmanager
def attending(run_dir: Path, lock: Path, timeout_s: float, setting: str, secrets: Redaction) -> Iterator[Input]:
    """Yield the input of this process, while its output is redacted, and `lock` is locked.

    The process of an interrupted run may still do the rest, while the run is resumed: it is awaited.
    """
    entered = Input(timeout_s)
    with redacted_output(secrets), held(run_dir), file_lock(lock, timeout_s + _LOCK_MARGIN_S, setting):
        yield entered


def start_module(module: str, arguments: Sequence[str], log: Optional[Path]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments`. Its standard input is a pipe, and its output is appended to `log`.

    Without a log its standard output is a pipe, too, and its errors go to those of this process.

    Raises:
        OSError: the log cannot be written, or the process cannot be started.
    """
    paths = [str(Path(raypod.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(os.fdopen(open_to_append(log), "ab"))
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else output,
            stderr=None if output is None else subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process of `start_module` and those that it has started, which have its session.

    One that waits for a disk or network file system in the kernel ends when that answers: it is awaited for 10 s.
    """
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    # The number is reserved until the process is awaited, and while its group has members; then it is free for others.
    if process.returncode is None or not Path(f"/proc/{process.pid}").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _end_all() -> None:
    """End this process and those that it has started, which have its session."""
    if os.getsid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
