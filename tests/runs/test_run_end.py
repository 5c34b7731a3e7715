from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypod.plan import layout
from raypod.runs import lease, run_state
from raypod.runs.run_state import RunEndWatch, RunState
from raypod.system.process import process_start_ticks


def state(**changed: object) -> RunState:
    ticks = process_start_ticks(os.getpid()) or 0
    found = RunState(os.getpid(), ticks, os.uname().nodename, run_state.RUNNING, 3, 9)
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def write(folder: Path, content: RunState) -> None:
    (folder / layout.STATE).write_text(json.dumps(dataclasses.asdict(content)))


def test_a_run_ends_when_its_state_has_the_end_and_its_process_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = RunEndWatch(tmp_path)
    assert watch.poll() is None
    assert not watch.is_known
    write(tmp_path, state())
    assert watch.poll() is None
    assert watch.is_known
    write(tmp_path, state(state=run_state.FAILED, exit_code=1))
    assert watch.poll() is None  # this process may print more
    monkeypatch.setattr(run_state, "_EXIT_S", 0.0)
    found = watch.poll()
    assert found is not None
    assert found.exit_code == 1


def test_a_coordinator_that_is_gone_has_no_exit_code(tmp_path: Path) -> None:
    write(tmp_path, state(started_ticks=1))
    found = RunEndWatch(tmp_path).poll()
    assert found is not None
    assert (found.exit_code, found.state.update) == (None, 3)


def test_the_end_of_a_launch(tmp_path: Path) -> None:
    launch = {"pid": 1, "started_ticks": 1, "host": os.uname().nodename, "state": "running", "command": ["a"]}
    (tmp_path / layout.LAUNCH).write_text(json.dumps({**launch, "host": "elsewhere"}))
    watch = RunEndWatch(tmp_path)
    assert (watch.poll(), watch.is_known) == (None, True)
    for ended, exit_code in (({"state": "failed", "exit_code": 3}, 3), ({}, None)):
        (tmp_path / layout.LAUNCH).write_text(json.dumps({**launch, **ended}))
        found = (watch if ended else RunEndWatch(tmp_path)).poll()
        assert found is not None
        assert found.exit_code == exit_code


@pytest.mark.parametrize("ahead_s", [-1200, -300, 300, 1200])
def test_the_clock_of_another_host_does_not_end_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """For the monitor, logs, report and dashboard: only a lease without new heartbeats ends."""
    now_s = 10000.0
    monkeypatch.setattr(run_state, "time", SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s))
    write(tmp_path, state(host="elsewhere"))
    holder = lease.Holder("owner", "elsewhere", "its boot", 1, 1, "today", lease.EXPIRES_AFTER_S)
    file = tmp_path / "lease-1.json"
    file.write_bytes(holder.content())
    watch = RunEndWatch(tmp_path)
    for _ in range(30):
        os.utime(str(file), (now_s + ahead_s, now_s + ahead_s))
        assert watch.poll() is None
        now_s += lease.HEARTBEAT_S
    now_s += lease.EXPIRES_AFTER_S
    found = watch.poll()
    assert found is not None
    assert found.exit_code is None
