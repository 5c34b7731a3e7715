"""A resumed run verifies its checkpoint once, in the process that trains, and reads it once more to load it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Dict

import pytest

from raypod.train import main

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--lr-schedule", "constant"]
# Python imports the module at the start of each process; it records every file that is opened for reading.
RECORDER = """
import os, sys
log = os.open(os.environ["OPENED_FILES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def record(event, arguments):
    # Python 3.8 also reports the call of os.open within open; it has no mode.
    is_read = event == "open" and arguments[1] is not None and not arguments[2] & os.O_CREAT
    if is_read and str(arguments[0]).endswith(".safetensors"):
        os.write(log, f"{os.getpid()} {arguments[0]}\\n".encode())
sys.addaudithook(record)
"""


def train(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", str(folder), *flags]
    environment = {**os.environ, **variables}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run of two updates, in this process."""
    assert main([*FLAGS, "--run-dir", str(tmp_path / "run"), "--updates", "2"]) == 0
    return tmp_path / "run"


@pytest.mark.parametrize("how", ["--resume", "the same command", "--detach"])
def test_a_resumed_run_reads_each_file_of_its_checkpoint_twice(folder: Path, tmp_path: Path, how: str) -> None:
    log = tmp_path / "opened"
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "interrupted", "exit_code": 130}))
    flags = {"--resume": ["--resume", str(folder)], "--detach": ["--detach"]}.get(how, [])
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    resumed = train(folder, "--updates", "3", *flags, PYTHONPATH=path, OPENED_FILES=str(log))
    assert resumed.returncode == 0, resumed.stderr
    if how == "--detach":
        wait = [sys.executable, "-m", "raypod", "attach", str(folder)]
        assert subprocess.run(wait, capture_output=True, timeout=120, check=False).returncode == 0
    opened: Dict[str, int] = Counter(line.partition(" ")[2] for line in log.read_text().splitlines())
    first = {name: count for name, count in opened.items() if "update-00000002" in name}
    assert {Path(name).name for name in first} >= {"weights.safetensors", "optimizer.safetensors"}
    assert set(first.values()) == {2}
