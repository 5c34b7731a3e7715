"""The same command continues a run under Ray that was preempted while it waited for data, or whose coordinator died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import psutil
import pytest

from raypod.__main__ import main
from raypod.runs import run_state
from tests.support import SUPPORT
from tests.support.bounded import COMMAND_S, GONE_WITHIN_S, wait_until

CODE = 85
FLAGS = ["--device", "emulated", "--dataset", "preemptible:data", "--model", "preemptible:model", "--no-augment"]
FLAGS += ["--lr-schedule", "constant", "--checkpoint-every", "8 updates", "--num-workers", "1"]
FLAGS += ["--preemption-grace-s", "600", "--preemption-exit-code", str(CODE)]
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def line_of(folder: Path, *flags: str) -> List[str]:
    return [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", str(folder), *flags]


def train(folder: Path, *flags: str) -> None:
    done = subprocess.run(line_of(folder, *flags), capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr


def summary(folder: Path) -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def newest(folder: Path) -> int:
    return int((folder / "checkpoints" / "LATEST").read_text().strip().rpartition("-")[2])


def assert_gone(processes: List[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=GONE_WITHIN_S)[1]  # Ray's agents would live for minutes


def test_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(SUPPORT / "preemptible.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "steady").touch()
    folder = tmp_path / "run"
    preempt_the_first_process(folder)
    kill_the_coordinator(folder, newest(folder))
    (tmp_path / "steady").unlink()
    updates = str(newest(folder) + 6)
    train(folder, "--updates", updates)
    undisturbed = tmp_path / "undisturbed"
    train(undisturbed, "--updates", updates, "--fleet", "inline", "--num-instances", "1")
    assert summary(folder)["weights_sha256"] == summary(undisturbed)["weights_sha256"]
    assert main(["verify-data", str(folder)]) == 0


def kill_the_coordinator(folder: Path, after_update: int) -> None:
    train(folder, "--detach", "--updates", "4000")
    state = run_state.read(folder)
    coordinator = psutil.Process(state.pid)
    try:
        assert wait_until(lambda: newest(folder) > after_update)
        processes = coordinator.children(recursive=True)
        named = {process.pid: process.ppid() for process in processes if "InstanceP" in process.name()}
        # On Ray 2.10 the workers of an instance, which load its data, have its name.
        assert len([parent for parent in named.values() if parent not in named]) == 2
    finally:
        coordinator.kill()
    assert_gone(processes)


def preempt_the_first_process(folder: Path) -> None:
    """Preempt the run as PID 1 of a container: such a process gets only signals with handlers, and adopts orphans."""
    may_unshare = shutil.which("unshare") and not subprocess.run([*NAMESPACE, "true"], check=False).returncode
    within = NAMESPACE if may_unshare else []
    waits = folder.parent / "in-data"
    (folder.parent / "at-data").touch()
    with (folder.parent / "out").open("w+") as out:
        line = [*within, *line_of(folder, "--updates", "4000")]
        command = subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        started = psutil.Process(command.pid)
        try:
            assert wait_until(lambda: waits.exists() or command.poll() is not None, COMMAND_S)
            assert command.poll() is None, Path(out.name).read_text()
            first = started.children()[0] if within else started
            processes = first.children(recursive=True)
            first.send_signal(signal.SIGTERM)
            assert command.wait(COMMAND_S) == CODE, Path(out.name).read_text()
        finally:
            for process in [*started.children(recursive=True), started] if command.poll() is None else []:
                process.kill()
            command.wait()
    assert_gone(processes)
    assert not (folder.parent / "waited").exists()
    state = run_state.read(folder)
    assert (state.state, state.update) == (run_state.PREEMPTED, newest(folder))
    assert (state.pid == 1) is bool(within)
    assert summary(folder)["preempted"]
