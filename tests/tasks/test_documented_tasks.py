"""The tasks of docs/your-own-task.md learn, and type checkers accept them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from documented import commands, modules

from raypod import train

PAGE = "your-own-task.md"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the modules of the page."""
    for name, code in modules(PAGE).items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("task", "metric", "worst"), [("diabetes", "mae", 0.6), ("shapes", "iou", 70)])
def test_the_commands_train(folder: Path, task: str, metric: str, worst: float) -> None:
    command = next(line.split() for line in commands(PAGE) if f"--task {task}:" in line)
    assert command[:3] == ["python", "-m", "raypod.train"]
    assert train.main([*command[3:], "--fleet", "inline", "--run-dir", str(folder / "run")]) == 0
    value = json.loads((folder / "run" / "summary.json").read_text())[f"test_{metric}"]
    assert value > worst if metric == "iou" else value < worst


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed (extra dev)")
def test_type_checkers_accept_the_modules(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        f"--cache-dir={folder / 'cache'}",
        *modules(PAGE),
    ]
    done = subprocess.run(
        command, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
