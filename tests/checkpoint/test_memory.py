"""Saving and verifying a checkpoint need no memory beyond the state, and loading one needs that of one state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STATE_MB = 96
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from raypod.checkpoint import storage, tensors, writer
from raypod.checkpoint.format import Manifest, Retention

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
