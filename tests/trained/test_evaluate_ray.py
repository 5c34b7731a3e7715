"""`raypod evaluate` in several instances under Ray, as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bounded import COMMAND_S


def test_several_instances_compute_the_result_of_the_training(digits_run: Path) -> None:
    command = [sys.executable, "-m", "raypod", "evaluate", str(digits_run), "--num-instances", "2", "--json"]
    pipe = subprocess.PIPE
    done = subprocess.run(command, stdout=pipe, stderr=pipe, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    last = json.loads((digits_run / "evaluations.jsonl").read_text().splitlines()[-1])
    assert (found["loss"], found["accuracy"], found["samples"]) == (last["loss"], last["accuracy"], last["samples"])
