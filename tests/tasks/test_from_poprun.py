"""The steps of docs/how-to/from-poprun.md run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documented import commands, modules

from raypod import train

PAGE = "how-to/from-poprun.md"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in modules(PAGE).items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)


def test_the_program_runs_unchanged(tmp_path: Path) -> None:
    command = next(line.split() for line in commands(PAGE) if line.startswith("raypod launch"))
    command = [sys.executable, "-m", *(sys.executable if word == "python" else word for word in command)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[Epoch 02] loss: " in done.stdout
    assert (tmp_path / "model.pt").is_file()


def test_the_task_trains(tmp_path: Path) -> None:
    command = next(line.split() for line in commands(PAGE) if line.startswith("raypod train"))
    inline = ["--num-instances", "1", "--fleet", "inline", "--run-dir", str(tmp_path / "run")]
    assert train.main([*command[2:], *inline]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["test_accuracy"] > 80
