"""The coordinator of a run under Ray is killed: all its processes end, and the same command resumes the run exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import psutil
from bounded import COMMAND_S, GONE_WITHIN_S, wait_until

from raypod.__main__ import main
from raypod.record import run_state

FLAGS = ["--device", "emulated", "--lr-schedule", "constant", "--checkpoint-every", "8 updates", "--epochs", "400"]


def train(folder: Path, *flags: str) -> None:
    line = [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", str(folder), *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr


def summary(folder: Path) -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_same_command_resumes_a_run_whose_coordinator_was_killed(tmp_path: Path) -> None:
    folder, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    train(folder, "--detach")
    state = run_state.read(folder)
    assert state is not None
    coordinator = psutil.Process(state.pid)
    try:
        assert wait_until(lambda: (folder / "checkpoints" / "LATEST").is_file(), 60)
        processes = coordinator.children(recursive=True)
        assert len([process for process in processes if "InstanceP" in process.name()]) == 2
    finally:
        coordinator.kill()
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)  # Ray's agents would live for minutes
    assert not alive
    newest = int((folder / "checkpoints" / "LATEST").read_text().strip().rpartition("-")[2])
    updates = str(newest + 6)
    train(folder, "--updates", updates)
    train(undisturbed, "--updates", updates, "--fleet", "inline", "--num-instances", "1")
    assert summary(folder)["weights_sha256"] == summary(undisturbed)["weights_sha256"]
    assert main(["verify-data", str(folder)]) == 0
