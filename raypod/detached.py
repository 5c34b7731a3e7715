"""A run that outlives the terminal: `--detach`, and `python -m raypod status|attach|stop RUN`.

The supervisor is the coordinator itself, in a session of its own; what it prints goes to `logs/coordinator.log`. All
others read `state.json` and that log, and send signals to the one process that `state.json` names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List, Sequence, Tuple

from raypod.errors import ConfigError, RunError
from raypod.record import run_state
from raypod.record.run_state import RunState

_LOOK_EVERY_S = 0.2


def log_of(run_dir: Path) -> Path:
    """Where a detached run's own output goes."""
    return run_dir / "logs" / "coordinator.log"


def detach(argv: Sequence[str], run_dir: Path, start_timeout_s: float) -> int:
    """Carry out a command line of `raypod.train` in a process of its own; returns once it trains, or its exit code."""
    log = log_of(run_dir)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "raypod.train", *_without_place(argv), "--run-dir", str(run_dir)]
    with log.open("ab") as output:
        began = output.tell()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"Run folder: {run_dir}\nSupervisor: pid {child.pid}, its output: {log}")  # noqa: T201
    deadline = time.monotonic() + start_timeout_s
    with contextlib.suppress(KeyboardInterrupt):  # it ends the waiting here, not the run
        while time.monotonic() < deadline:
            state = run_state.read(run_dir)
            if state is not None and state.pid == child.pid and state.state == run_state.RUNNING:
                break
            code = child.poll()
            if code is not None:
                sys.stderr.buffer.write(_last_line(log, began))
                sys.stderr.flush()
                return code
            time.sleep(_LOOK_EVERY_S)
    print(f"python -m raypod status|attach|stop {run_dir}")  # noqa: T201
    child.returncode = 0  # it goes on without us: nothing to be warned of
    return 0


def status(run_dir: Path) -> int:
    """Print how far a run is; 0 while it runs or when it is done, 1 if it failed or its coordinator is gone."""
    state = _state_of(run_dir)
    latest = run_dir / "checkpoints" / "LATEST"
    name, is_well = _told(state)
    rows = [
        ("state", name),
        ("coordinator", f"pid {state.pid} on {state.host}"),
        ("update", f"{state.update} of {state.total_updates}"),
    ]
    if state.loss is not None:
        rows.append(("loss", f"{state.loss:.3f}, {state.samples_per_s or 0:.0f} images/s"))
    if state.restarts:
        rows.append(("restarts", str(state.restarts)))
    rows.append(("checkpoint", latest.read_text().strip() if latest.is_file() else "none yet"))
    rows.append(("said", f"{max(0.0, time.time() - state.written_at_s):.0f} s ago"))
    print("\n".join(f"{key:>12}  {text}" for key, text in rows))  # noqa: T201
    return 0 if is_well else 1


def attach(run_dir: Path) -> int:
    """Show the output of a detached run as it comes, until it ends; its exit code. Ctrl-C leaves the run alone."""
    log = log_of(run_dir)
    if not log.is_file():
        raise ConfigError(f"{run_dir} has no {log.name}: its run was not started with --detach")
    try:
        with log.open("rb") as output:
            while True:
                state = _state_of(run_dir)
                _copy(output.read())
                if state.is_over or not _may_live(state):
                    _copy(output.read())
                    break
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        print(f"\nThe run goes on: python -m raypod status|attach|stop {run_dir}")  # noqa: T201
        return 0
    if state.exit_code is None:
        raise RunError(
            f"the coordinator of {run_dir} died at update {state.update}; the same command goes on from there"
        )
    return state.exit_code


def stop(run_dir: Path, within_s: float = 900.0) -> int:
    """End a run after the calls under way, with a checkpoint; the second time at once. 0 once it has ended.

    Raises:
        RunError: it does not end within `within_s` seconds, which leave room for a long call and a large checkpoint.
    """
    state = _state_of(run_dir)
    if not state.is_here:
        raise ConfigError(f"the coordinator of {run_dir} was started on host {state.host}; stop it there")
    if state.is_over or not state.is_alive:
        print(f"{run_dir}: nothing to stop, {_told(state)[0]}")  # noqa: T201
        return 0
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + within_s
    while state.is_alive:
        if time.monotonic() > deadline:
            raise RunError(f"{run_dir}: no end within {within_s:g} s of SIGTERM; a second stop ends it at once")
        time.sleep(_LOOK_EVERY_S)
    print(f"{run_dir}: {_told(_state_of(run_dir))[0]}")  # noqa: T201
    return 0


def _state_of(run_dir: Path) -> RunState:
    state = run_state.read(run_dir)
    if state is None:
        raise ConfigError(f"{run_dir} has no {run_state.NAME} that can be read; is it the folder of a run?")
    return state


def _may_live(state: RunState) -> bool:
    return state.is_alive or not state.is_here


def _told(state: RunState) -> Tuple[str, bool]:
    """A state in words, and whether all is well."""
    if state.state == run_state.FAILED:
        return f"failed (exit code {state.exit_code}): {state.message}", False
    if state.is_over:
        return f"{state.state} after update {state.update}", True
    if not _may_live(state):
        return (
            f"its coordinator died at update {state.update}; the same command goes on from the last checkpoint",
            False,
        )
    return state.state, True


def _without_place(argv: Sequence[str]) -> List[str]:
    """The command line without what says that and where it is to run."""
    left: List[str] = []
    skip = False
    for word in argv:
        is_place = word == "--run-dir" or word.startswith(("--run-dir=", "run.run_dir="))
        if not skip and not is_place and word != "--detach":
            left.append(word)
        skip = not skip and word == "--run-dir"
    return left


def _last_line(log: Path, began: int) -> bytes:
    lines = [line for line in log.read_bytes()[began:].splitlines(keepends=True) if line.strip()]
    return lines[-1] if lines else b""


def _copy(output: bytes) -> None:
    sys.stdout.write(output.decode(errors="replace"))
    sys.stdout.flush()
