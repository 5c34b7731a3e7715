"""The tasks of docs/tutorials/your-own-task.md learn, their models are used, and type checkers accept them."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documented import commands, modules

from raypod import train
from raypod.__main__ import main
from raypod.trained.formats import METADATA_FILE

PAGE = "tutorials/your-own-task.md"
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
    assert command[:2] == ["raypod", "train"]
    assert train.main([*command[2:], "--fleet", "inline", "--run-dir", str(folder / "run")]) == 0
    value = json.loads((folder / "run" / "summary.json").read_text())[f"test_{metric}"]
    assert value > worst if metric == "iou" else value < worst


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_the_model_of_a_task_predicts_generates_and_is_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [shlex.split(line)[1:] for line in commands(PAGE) if "letters" in line]
    assert [line[0] for line in lines] == ["train", "predict", "predict", "export"]
    assert train.main([*lines[0][1:], "--epochs", "1", "--fleet", "inline"]) == 0
    outputs = []
    for line in lines[1:]:
        capsys.readouterr()
        assert main(line) == 0
        outputs.append(capsys.readouterr().out)
    header, *rows = outputs[0].splitlines()
    assert (header.split(), len(rows)) == (["file", "rank", "next", "probability"], 3)
    assert rows[0].startswith("letters.py  1     ' '")  # the file ends with a line break, before an indentation
    prompt = lines[2][lines[2].index("--prompt") + 1]
    assert outputs[1].startswith(prompt)
    assert len(outputs[1]) == len(f"{prompt}\n") + 40
    (file,) = (folder / "runs" / "letters").glob("Letters-update-*.pt")
    extra = {METADATA_FILE: ""}
    logits = torch.jit.load(str(file), _extra_files=extra)(torch.tensor([10]))  # type: ignore[no-untyped-call]
    assert int(logits.argmax()) == ord(" ")
    description = json.loads(json.loads(extra[METADATA_FILE])["raypod.description"])
    assert description["output"] == "logits of the next character"
    assert main(["predict", "runs/letters", "--prompt", ""]) == 2
    assert "--prompt must have" in capsys.readouterr().err


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
