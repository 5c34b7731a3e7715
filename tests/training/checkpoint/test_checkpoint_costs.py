"""What checkpoints cost: saving and verifying need no memory beyond the state, and a resume reads each file twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from raypod.train import main

pytestmark = pytest.mark.usefixtures("processes")
STATE_MB = 96
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from raypod.training.checkpoint import storage, tensors, writer
from raypod.training.checkpoint.format import Manifest, Retention
def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(key))
def growth(action):
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    result = action()
    return status("VmHWM") - before, result
def state_of(megabytes):
    half = torch.ones(megabytes // 2, 250000)
    return writer.State({"weight": half}, {"momentum": half.clone()})
folder, kept = Path(sys.argv[1]), Retention(3)
warm_up = writer.write_checkpoint(folder, Manifest(2, 0, 0, 1, {}, {}, {}), state_of(2), kept)
storage.verify(warm_up)
writer.load_checkpoint(warm_up.path)
state = state_of(int(sys.argv[2]))
found = {}
found["check"], nonfinite = growth(lambda: writer._first_nonfinite(state))
found["save"], saved = growth(lambda: writer.write_checkpoint(folder, Manifest(4, 0, 0, 1, {}, {}, {}), state, kept))
found["verify"], _ = growth(lambda: storage.verify(saved))
found["load"], loaded = growth(lambda: writer.load_checkpoint(saved.path))
assert nonfinite is None and torch.equal(loaded["weights"]["weight"], state.weights["weight"])
print(json.dumps(found))
"""
FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--lr-schedule", "constant"]


def test_the_peak_of_resident_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this kernel cannot reset the peak of resident memory (/proc/self/clear_refs)")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(STATE_MB)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    grown = json.loads(ended.stdout)
    # The stacks of threads, and the heap; a copy of the largest tensor would be 48 MB.
    assert max(grown["check"], grown["save"], grown["verify"]) < 8, grown
    assert grown["load"] < STATE_MB + 8, grown


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


@pytest.mark.parametrize("how", ["--resume", "--detach"])
def test_a_resumed_run_reads_each_file_of_its_checkpoint_twice(tmp_path: Path, how: str) -> None:
    """It verifies the checkpoint once, in the process that trains, and reads it once more to load it."""
    folder, log = tmp_path / "run", tmp_path / "opened"
    assert main([*FLAGS, "--run-dir", str(folder), "--updates", "2"]) == 0
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "interrupted", "exit_code": 130}))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, "OPENED_FILES": str(log)}

    def run(module: str, *flags: str) -> None:
        line = [sys.executable, "-m", module, *flags]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=variables)
        assert done.returncode == 0, done.stderr

    if how == "--resume":
        run("raypod.train", "--resume", str(folder), "--updates", "3")
    else:  # the same command as before
        run("raypod.train", *FLAGS, "--run-dir", str(folder), "--updates", "3", "--detach")
        run("raypod", "attach", str(folder))
    opened = Counter(line.partition(" ")[2] for line in log.read_text().splitlines())
    first = {Path(name).name: count for name, count in opened.items() if "update-00000002" in name}
    assert set(first) >= {"weights.safetensors", "optimizer.safetensors"}
    assert set(first.values()) == {2}
