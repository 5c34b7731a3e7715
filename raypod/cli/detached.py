"""Background runs: `--detach`, and `raypod status|attach|stop RUN`.

The coordinator runs in a session of its own, or as a Ray job, and its output is in `logs/coordinator.log`. The other
commands read `state.json` and that log, and send signals to the process that `state.json` names, if it holds the
folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Optional, Sequence, Tuple

from tqdm import tqdm
from typing_extensions import Protocol

from raypod.errors import ClusterError, ConfigError, RunError, UserError
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import lease, run_state
from raypod.runs.claim import Claim
from raypod.runs.run_folder import log_of, with_newest_update
from raypod.runs.run_state import RunEndWatch, RunState, is_coordinator
from raypod.runtime.workers.ray_jobs import JobServer, find_job_server
from raypod.system import job_driver
from raypod.system.command_line import INTERRUPTED, format_table, printable, show, tell, without_flags
from raypod.system.log_files import last_line
from raypod.system.process import process_start_ticks
from raypod.training.checkpoint import storage

RAY_JOB, PROCESS = "ray-job", "process"  # the values of --detach-as
_POLL_S = 0.2
_OPEN_WITHIN_S = 2.0  # for a coordinator that has written its state to open its event log
_STOPPED_S = 2.0  # a debugger that attaches stops a process for a moment
# Ray kills a job that needs longer after `ray job stop`: a long call and a large checkpoint, as for `raypod stop`.
_STOP_WITHIN_S = 900
_START_WITHIN_S = 60.0  # for Ray to start the process of a job
_JOB_POLL_S, _SEND_S, _END_S = 0.5, 10.0, 10.0
_LONGEST_SOCKET = 100  # bytes of its path, by sockaddr_un
_LONGEST_NAME, _LONGEST_CAUSE = 40, 300


def detach(argv: Sequence[str], claimed: Claim, plan: Plan, way: Optional[str] = None) -> int:
    """Start a command line of `raypod train` in the background, and hand the claim over to its process.

    It is a Ray job where the cluster that the run joins has a job server, otherwise a process that this one starts;
    `way` (RAY_JOB, PROCESS) determines it. Returns 0 once the run has finished an update or `start_timeout_s` seconds
    have passed, or the exit code of a process that ended.

    Raises:
        UserError: `way` is RAY_JOB, and there is no job server or Ray does not start the job; the log is not writable.
        RunError: the job has ended while it was started.
    """
    server, reason = _job_server(plan, way)
    log = log_of(claimed.folder)
    kept = without_flags([word for word in argv if word != "--detach"], "--run-dir", "run.run_dir", "--detach-as")
    own = ["--run-dir", str(claimed.folder), "--lease", claimed.lease.owner]
    command = [sys.executable, "-m", "raypod.train", *kept, *own]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error.strerror}") from None
    with output, contextlib.ExitStack() as stack:
        began = output.tell()
        started: Optional[_Background] = None
        if server is not None:
            try:
                started = stack.enter_context(RayJob(server, claimed.folder.name, command, log))
            except RunError as error:
                if way == RAY_JOB:
                    raise ClusterError(f"--detach-as {RAY_JOB}: {error}") from None
                reason = str(error)
        if started is None:
            started = _BackgroundProcess(command, output)
        claimed.hand_over(started.pid)
        try:
            started.begin()
        except RunError:
            claimed.take_back(discard=True)
            raise
        show(f"Run folder: {claimed.folder}\n{started.text}, its output: {log}")
        if reason:
            show(f"Not a Ray job: {reason}")
        return _await_start(started, claimed, log, began, plan.config.run.start_timeout_s)


def _job_server(plan: Plan, way: Optional[str]) -> Tuple[Optional[JobServer], str]:
    """Return the job server for a run; without one, the reason."""
    if way == PROCESS:
        return None, f"--detach-as {PROCESS}"
    try:
        if plan.config.run.fleet == "inline":
            raise ConfigError("--fleet inline does not use Ray")
        return find_job_server(plan.placement.cluster), ""
    except UserError as error:
        if way == RAY_JOB:
            raise ConfigError(f"--detach-as {RAY_JOB}: {error}") from None
        return None, str(error)


def _await_start(started: _Background, claimed: Claim, log: Path, began: int, within_s: float) -> int:
    """Wait until the run has finished an update. `began` is the size of its log in bytes before it was started."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the wait, not the run
        while time.monotonic() < deadline:
            state = run_state.read(claimed.folder)
            if state is not None and state.pid == started.pid and _trains(state):
                break
            code = started.poll()
            if code is not None:
                line = last_line(log.read_bytes()[began:].decode(errors="replace"))
                if line:
                    tell(line, sys.stderr)
                claimed.take_back(discard=code == UserError.exit_code)
                return code
            time.sleep(_POLL_S)
    show(f"raypod status|attach|stop {claimed.folder}")
    started.leave()
    return 0


def _trains(state: RunState) -> bool:
    """Return whether a run has finished an update: until then a user's mistake leaves no run folder."""
    return state.state in (run_state.RUNNING, run_state.DONE) and state.samples_per_s is not None


def status(run_dir: Path) -> int:
    """Print the state of a run. Return 1 if it failed or its coordinator died, else 0."""
    found, watch = lease.current(run_dir), RunEndWatch(run_dir)
    watch.observe(lambda text: show(text, sys.stderr))
    checkpoint = storage.latest_name(run_dir)  # read before the update, which is not older then
    is_behind = _is_behind(run_dir, checkpoint)
    is_alive, state = watch.poll() is None, with_newest_update(run_dir, _state_of(run_dir), is_behind)
    now_s, written_s = time.time(), state.written_at_s
    if is_alive and not state.is_local:  # by the clock of the disk, which has just renewed the lease
        found = lease.current(run_dir) or found
        with contextlib.suppress(OSError):
            now_s, written_s = _disk_time(found, now_s), (run_dir / layout.STATE).stat().st_mtime
    silent_s = max(0.0, now_s - found.renewed_s) if found else 0.0
    name, is_healthy = _describe(state, is_alive)
    left = (
        "" if state.eta_s is None or not is_alive or state.is_stopped else f", {tqdm.format_interval(state.eta_s)} left"
    )
    rows = [
        ("state", name),
        ("coordinator", f"pid {state.pid} on {state.host}"),
        ("update", f"{state.update} of {state.total_updates}{left}"),
    ]
    if state.submission_id is not None:
        rows.insert(2, ("Ray job", state.submission_id))
    if state.loss is not None:
        rows.append(("loss", f"{state.loss:.3f}, {state.samples_per_s or 0:.0f} {state.samples_are}/s"))
    if state.restarts:
        rows.append(("restarts", str(state.restarts)))
    rows.append(("checkpoint", checkpoint or "none yet"))
    if found is not None:
        rows.append(
            ("heartbeat", f"{silent_s:.0f} s ago; the lease expires after {found.expires_after_s:g} s without one")
        )
    rows.append(("updated", f"{max(0.0, now_s - written_s):.0f} s ago"))
    show("\n".join(format_table([(key.rjust(12), text) for key, text in rows])))
    return 0 if is_healthy else 1


def _disk_time(found: Optional[lease.LeaseFile], now_s: float) -> float:
    """Return the time of the disk on which a live holder renews a lease, in seconds since 1970."""
    if found is None or -lease.HEARTBEAT_S <= now_s - found.renewed_s < found.expires_after_s:
        return now_s
    return found.renewed_s


def attach(run_dir: Path) -> int:
    """Print the output of a detached run until it ends, and return its exit code. Ctrl-C does not affect the run."""
    log = log_of(run_dir)
    if not log.is_file():
        raise ConfigError(f"{run_dir} has no {log.name}: its run was not started with --detach")
    watch, end = RunEndWatch(run_dir), None
    try:
        with log.open("rb") as output:
            while end is None:
                _state_of(run_dir)
                end = watch.poll()
                _copy(output.read())
                if end is None:
                    time.sleep(_POLL_S)
    except KeyboardInterrupt:
        show(f"\nThe run continues: raypod status|attach|stop {run_dir}")
        return 0
    if end.exit_code is None:
        update = with_newest_update(run_dir, end.state).update
        raise RunError(f"the coordinator of {run_dir} died at update {update}; the same command resumes the run")
    return end.exit_code


def stop(run_dir: Path, within_s: float = 900.0, number: int = signal.SIGINT) -> int:
    """Stop a run after the current call, with a checkpoint; a second stop ends it at once. Return 0 when it has ended.

    It sends the signal `number`, by default not SIGTERM, which can be the notice of a preemption.

    Raises:
        RunError: the run does not end within `within_s` seconds; the default allows a long call and a large checkpoint.
            Or its process is stopped (SIGSTOP): it gets the signal when it continues.
    """
    state = _state_of(run_dir)
    if not state.is_local:
        raise ConfigError(
            f"the coordinator of {run_dir} was started on host {state.host}; stop it there, or continue the run here "
            "with --take-over"
        )
    if state.has_ended or not state.is_alive:
        show(f"{run_dir}: nothing to stop, {_describe(with_newest_update(run_dir, state), is_alive=False)[0]}")
        return 0
    _signal(run_dir, state, number)
    deadline = time.monotonic() + within_s
    continued_s = time.monotonic()  # when the process was last seen not to be stopped
    while state.is_alive:
        if not state.is_stopped:
            continued_s = time.monotonic()
        elif time.monotonic() - continued_s >= _STOPPED_S:
            raise RunError(
                f"{run_dir}: its process is stopped (SIGSTOP, SIGTSTP or a debugger), and ends with a checkpoint when "
                f"it continues: kill -CONT {state.pid}; or kill -KILL {state.pid} ends it at once, and the same "
                "command resumes from the last checkpoint"
            )
        if time.monotonic() > deadline:
            raise RunError(
                f"{run_dir}: the run has not ended {within_s:g} s after the request; a second stop ends it at once"
            )
        time.sleep(_POLL_S)
    show(f"{run_dir}: {_describe(_state_of(run_dir), is_alive=False)[0]}")
    return 0


def _signal(run_dir: Path, state: RunState, number: int) -> None:
    """Send a signal to the coordinator of a run.

    Raises:
        ConfigError: the process that `state.json` names is not the run's, or cannot be examined.
    """
    deadline = time.monotonic() + _OPEN_WITHIN_S
    while not is_coordinator(run_dir, state):
        if _state_of(run_dir).has_ended:  # meanwhile, and its event log is closed
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{run_dir}: process {state.pid}, which {layout.STATE} names, does not hold this folder, so it is "
                "not signalled; if the run is another user's or in a container, stop it as that user or there"
            )
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(state.pid, number)


def _state_of(run_dir: Path) -> RunState:
    state = run_state.read(run_dir)
    if state is None:
        raise ConfigError(f"{run_dir} has no readable {layout.STATE}; is it a run folder?")
    return state


def _describe(state: RunState, is_alive: bool) -> Tuple[str, bool]:
    """Return the state as text, and whether the run is healthy."""
    if state.state == run_state.FAILED:
        return f"failed (exit code {state.exit_code}): {state.message}", False
    if state.has_ended:
        return f"{state.state} after update {state.update}{': ' if state.message else ''}{state.message}", True
    if not is_alive:
        return (
            f"its coordinator died at update {state.update}; the same command resumes from the last checkpoint",
            False,
        )
    if state.is_stopped:
        return (
            f"{state.state}, but its process is stopped (SIGSTOP, SIGTSTP or a debugger); kill -CONT {state.pid} "
            "continues it",
            True,
        )
    return state.state, True


def _is_behind(run_dir: Path, checkpoint: Optional[str]) -> bool:
    """Return whether the state of a run is older than a checkpoint, as it is not written after every update."""
    if checkpoint is None:
        return False
    paths = (run_dir / layout.STATE, storage.checkpoints_folder(run_dir) / checkpoint)
    with contextlib.suppress(FileNotFoundError):  # a newer checkpoint has replaced it
        state_s, checkpoint_s = (path.stat().st_mtime for path in paths)
        return state_s < checkpoint_s
    return False


def _copy(output: bytes) -> None:
    states = output.decode(errors="replace").split("\r")  # of progress bars
    sys.stdout.write("\r".join(map(printable, states)))
    sys.stdout.flush()


class _Background(Protocol):
    """A command that is being started; `pid` is its process, and `text` describes it."""

    pid: int
    text: str

    def begin(self) -> None:
        """Let it begin."""

    def poll(self) -> Optional[int]:
        """Return its exit code; None while it runs."""

    def leave(self) -> None:
        """Leave it to itself."""


class _BackgroundProcess:
    """A process in a session of its own."""

    def __init__(self, command: Sequence[str], output: BinaryIO) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid
        self.text = f"Supervisor: pid {self.pid}"

    def begin(self) -> None:
        """It has begun."""

    def poll(self) -> Optional[int]:
        return self._process.poll()

    def leave(self) -> None:
        self._process.returncode = 0  # prevents Popen's ResourceWarning: the process continues on purpose


class RayJob:
    """A Ray job. Its process waits until `begin` for the environment; leaving the context before that ends the job."""

    def __init__(self, server: JobServer, name: str, command: Sequence[str], log: Path) -> None:
        """Submit the job, and wait until its process runs. `name` is the beginning of its submission id.

        Raises:
            RunError: the server rejects it, or Ray does not start it within 60 s.
        """
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:_LONGEST_NAME]
        self.submission_id = f"raypod-{name}-{secrets.token_hex(4)}"
        self._server, self._folder = server, _private_folder()
        self._connection: Optional[socket.socket] = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                path = f"{self._folder}/socket"
                listener.bind(path)
                listener.listen(1)
                listener.settimeout(_JOB_POLL_S)
                own = [sys.executable, "-I", job_driver.__file__, path, str(log.resolve())]
                entrypoint = " ".join(map(shlex.quote, ["exec", *own, *command]))
                server.submit(self.submission_id, entrypoint, {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WITHIN_S)})
                self._connection = self._accept(listener)
                self.pid = self._check_peer(self._connection)
        except BaseException:
            self._stop()
            raise
        self._started_ticks = process_start_ticks(self.pid)
        self.text = f"Ray job: {self.submission_id} on {server.url}, pid {self.pid}"

    def begin(self) -> None:
        """Send the environment and the working folder of this process; RunError if the job has ended meanwhile."""
        assert self._connection is not None
        message = {"environment": dict(os.environ), "folder": str(Path.cwd())}
        try:
            self._connection.sendall(json.dumps(message).encode())
        except OSError as error:
            self._stop()
            raise RunError(f"Ray job {self.submission_id} has ended at its start: {error.strerror}") from None
        self._close()

    def poll(self) -> Optional[int]:
        if process_start_ticks(self.pid) == self._started_ticks:
            return None
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            with contextlib.suppress(RunError):
                job = self._server.job(self.submission_id)
                if job.exit_code is not None:
                    return job.exit_code
                if job.has_ended:
                    return INTERRUPTED  # stopped
            time.sleep(_JOB_POLL_S)
        return 1

    def leave(self) -> None:
        """Leave it to itself."""

    def __enter__(self) -> RayJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._stop()

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + _START_WITHIN_S
        while True:
            with contextlib.suppress(socket.timeout):
                connection, _ = listener.accept()
                connection.settimeout(_SEND_S)
                return connection
            job = self._server.job(self.submission_id)
            if job.has_ended:
                cause = " ".join(job.message.split())[-_LONGEST_CAUSE:]
                raise RunError(f"Ray job {self.submission_id} has ended at its start: {cause}")
            if time.monotonic() > deadline:
                raise RunError(f"Ray has not started job {self.submission_id} within {_START_WITHIN_S:g} s")

    def _check_peer(self, connection: socket.socket) -> int:
        """Return the pid of the job's process. RunError if it is another user's, host's or cluster's."""
        pid, user = job_driver.peer_of(connection)
        if user != os.getuid() or pid == 0:
            raise RunError(f"Ray job {self.submission_id} runs as another user or in another container")
        try:
            cluster = connection.recv(1 << 12).decode()
        except OSError as error:
            raise RunError(f"Ray job {self.submission_id} has ended at its start: {error}") from None
        if cluster.rpartition(":")[2] != self._server.cluster.rpartition(":")[2]:
            raise RunError(f"{self._server.url} is the job server of another Ray cluster, {cluster}")
        return pid

    def _stop(self) -> None:
        self._close()
        with contextlib.suppress(RunError):  # without this process the job ends by itself
            self._server.stop(self.submission_id)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="raypod-job-")
    if len(os.fsencode(folder)) > _LONGEST_SOCKET - len("/socket"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="raypod-job-", dir="/tmp")  # a new folder of mode 0700
    return folder
