"""The tasks of the documentation learn, their models are used, and type checkers accept them."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch

from raypod import launch, train
from raypod.__main__ import main
from raypod.api.inference.formats import METADATA_FILE
from raypod.system.command_line import printable
from tests.support import ROOT
from tests.support.documented import commands, modules
from tests.support.launches import use_inline_ray

OWN_TASK, FROM_POPRUN = "tutorials/your-own-task.md", "how-to/from-poprun.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the modules of the pages."""
    for page in (OWN_TASK, FROM_POPRUN):
        for name, code in modules(page).items():
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(page: str, start: str) -> List[str]:
    """Return the words after `raypod SUBCOMMAND` of a command of a page."""
    return next(shlex.split(line)[2:] for line in commands(page) if line.startswith(start))


@pytest.mark.parametrize(
    ("page", "task", "metric", "least", "most"),
    [
        (OWN_TASK, "friedman:", "mae", 0, 0.6),
        (OWN_TASK, "shapes:", "iou", 70, 100),
        (OWN_TASK, "sparse:", "absolute", 0, 40),
        (OWN_TASK, "circles:", "f1", 0.8, 1),
        (FROM_POPRUN, "", "accuracy", 80, 100),
    ],
)
def test_the_commands_train(folder: Path, page: str, task: str, metric: str, least: float, most: float) -> None:
    words = command(page, f"raypod train --task {task}")
    inline = ["--num-instances", "1", "--fleet", "inline", "--run-dir", str(folder / "run")]
    assert train.main([*words, *inline]) == 0
    assert least < json.loads((folder / "run" / "summary.json").read_text())[f"test_{metric}"] < most


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("start", ["raypod launch python", "raypod launch --num-replicas"])
def test_the_program_for_poprun_runs_unchanged(start: str, folder: Path, monkeypatch: Any, capfd: Any) -> None:
    use_inline_ray(monkeypatch)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    code = launch.main(command(FROM_POPRUN, start))
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "[Epoch 02] loss: " in out
    assert (folder / "model.pt").is_file()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_the_model_of_a_task_predicts_generates_and_is_exported(folder: Path, capsys: Any) -> None:
    lines = [shlex.split(line)[1:] for line in commands(OWN_TASK) if "letters" in line]
    assert [line[0] for line in lines] == ["train", "predict", "predict", "export"]
    assert train.main([*lines[0][1:], "--epochs", "1", "--fleet", "inline"]) == 0
    outputs = []
    for line in [*lines[1:], [*lines[2], "--json"]]:
        capsys.readouterr()
        assert main(line) == 0
        outputs.append(capsys.readouterr().out)
    header, *rows = outputs[0].splitlines()
    assert (header.split(), len(rows)) == (["file", "rank", "next", "probability"], 3)
    assert rows[0].startswith("letters.py  1     ' '")  # the file ends with a line break, before an indentation
    prompt = lines[2][lines[2].index("--prompt") + 1]
    generated = json.loads(outputs[3])
    assert (generated["prompt"], len(generated["text"])) == (prompt, 40)
    assert outputs[1] == printable(f"{prompt}{generated['text']}\n")
    (file,) = (folder / "runs" / "letters").glob("Letters-update-*.pt")
    extra = {METADATA_FILE: ""}
    logits = torch.jit.load(str(file), _extra_files=extra)(torch.tensor([10]))  # type: ignore[no-untyped-call]
    assert int(logits.argmax()) == ord(" ")
    description = json.loads(json.loads(extra[METADATA_FILE])["raypod.description"])
    assert description["output"] == "logits of the next character"
    assert main(["predict", "runs/letters", "--prompt", ""]) == 2
    assert "--prompt must have" in capsys.readouterr().err


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed (extra dev)")
def test_type_checkers_accept_the_modules(folder: Path) -> None:
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={folder / 'cache'}"]
    line = [sys.executable, "-m", "mypy", *options, *modules(OWN_TASK)]
    paths = f"{ROOT}:{ROOT / 'raypod' / 'emulated_sdk'}"
    done = subprocess.run(line, env={"MYPYPATH": paths}, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
