"""Background runs: `--detach`, and `raypod status|attach|stop RUN`.

The coordinator runs in a session of its own, or as a Ray job, and its output is in `logs/coordinator.log`. The other
commands read `state.json` and that log, and send signals to the process that `state.json` names, if it holds the
folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Optional, Sequence, Tuple

from tqdm import tqdm

from raypod.checkpoint import storage
from raypod.cli import format_table, printable, show, without_flags
from raypod.commands.background import Background, BackgroundProcess, RayJob
from raypod.errors import ClusterError, ConfigError, RunError, UserError
from raypod.fleet.ray_jobs import JobServer, find_job_server
from raypod.host import lease_file
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.record import run_state
from raypod.record.claim import Claim
from raypod.record.coordinator_log import log_of
from raypod.record.run_end import RunEndWatch, is_coordinator
from raypod.record.run_folder import last_update
from raypod.record.run_state import RunState

RAY_JOB, PROCESS = "ray-job", "process"  # the values of --detach-as
_POLL_S = 0.2
_OPEN_WITHIN_S = 2.0  # for a coordinator that has written its state to open its event log
_STOPPED_S = 2.0  # a debugger that attaches stops a process for a moment


def detach(argv: Sequence[str], claimed: Claim, plan: Plan, way: Optional[str] = None) -> int:
    """Start a command line of `raypod train` in the background, and hand the claim over to its process.

    It is a Ray job where the cluster that the run joins has a job server, otherwise a process that this one starts;
    `way` (RAY_JOB, PROCESS) determines it. Returns 0 once the run trains or `start_timeout_s` seconds have passed, or
    the exit code of a process that ended.

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
        started: Optional[Background] = None
        if server is not None:
            try:
                started = stack.enter_context(RayJob(server, claimed.folder.name, command, log))
            except RunError as error:
                if way == RAY_JOB:
                    raise ClusterError(f"--detach-as {RAY_JOB}: {error}") from None
                reason = str(error)
        if started is None:
            started = BackgroundProcess(command, output)
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


def _await_start(started: Background, claimed: Claim, log: Path, began: int, within_s: float) -> int:
    """Wait until the run trains. `began` is the size of its log in bytes before it was started."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the wait, not the run
        while time.monotonic() < deadline:
            state = run_state.read(claimed.folder)
            if state is not None and state.pid == started.pid and state.state == run_state.RUNNING:
                break
            code = started.poll()
            if code is not None:
                sys.stderr.buffer.write(_last_line(log, began))
                sys.stderr.flush()
                claimed.take_back(discard=code == UserError.exit_code)
                return code
            time.sleep(_POLL_S)
    show(f"raypod status|attach|stop {claimed.folder}")
    started.leave()
    return 0


def status(run_dir: Path) -> int:
    """Print the state of a run. Return 1 if it failed or its coordinator died, else 0."""
    found, watch = lease_file.current(run_dir), RunEndWatch(run_dir)
    watch.observe(lambda text: show(text, sys.stderr))
    is_alive, state = watch.poll() is None, _with_newest_update(run_dir, _state_of(run_dir))
    now_s, written_s = time.time(), state.written_at_s
    if is_alive and not state.is_local:  # by the clock of the disk, which has just renewed the lease
        found = lease_file.current(run_dir) or found
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
    rows.append(("checkpoint", storage.latest_name(run_dir) or "none yet"))
    if found is not None:
        rows.append(
            ("heartbeat", f"{silent_s:.0f} s ago; the lease expires after {found.expires_after_s:g} s without one")
        )
    rows.append(("updated", f"{max(0.0, now_s - written_s):.0f} s ago"))
    show("\n".join(format_table([(key.rjust(12), text) for key, text in rows])))
    return 0 if is_healthy else 1


def _disk_time(found: Optional[lease_file.LeaseFile], now_s: float) -> float:
    """Return the time of the disk on which a live holder renews a lease, in seconds since 1970."""
    if found is None or -lease_file.HEARTBEAT_S <= now_s - found.renewed_s < found.expires_after_s:
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
                state = _state_of(run_dir)
                end = watch.poll()
                _copy(output.read())
                if end is None:
                    time.sleep(_POLL_S)
    except KeyboardInterrupt:
        show(f"\nThe run continues: raypod status|attach|stop {run_dir}")
        return 0
    if end.exit_code is None:
        raise RunError(f"the coordinator of {run_dir} died at update {state.update}; the same command resumes the run")
    return end.exit_code


def announce_preemption(run_dir: Path) -> int:
    """Stop a run as `stop`, as the preemption of its machine does: docs/how-to/preemption.md."""
    return stop(run_dir, number=signal.SIGUSR1)


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
        show(f"{run_dir}: nothing to stop, {_describe(state, is_alive=False)[0]}")
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


def _with_newest_update(run_dir: Path, state: RunState) -> RunState:
    """Return the state of a run with the newest update of its metrics, if its process cannot write the state."""
    if state.has_ended or not state.is_local or (state.is_alive and not state.is_stopped):
        return state
    newest = None
    with contextlib.suppress(OSError, TypeError):  # TypeError: it has lines of another kind
        newest = last_update(run_dir)
    if newest is None or not isinstance(newest.update, int) or newest.update <= state.update:
        return state
    return dataclasses.replace(
        state,
        update=newest.update,
        loss=newest.loss if newest.has_results else state.loss,
        samples_per_s=newest.samples_per_s,
    )


def _last_line(log: Path, began: int) -> bytes:
    lines = [line for line in log.read_bytes()[began:].splitlines(keepends=True) if line.strip()]
    return lines[-1] if lines else b""


def _copy(output: bytes) -> None:
    states = output.decode(errors="replace").split("\r")  # of progress bars
    sys.stdout.write("\r".join(map(printable, states)))
    sys.stdout.flush()
