"""`raypod --help` and the dispatch of subcommands."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from raypod import train
from raypod.__main__ import main
from raypod.cli import parser_of
from raypod.commands import table

LIGHT = ["--help", "version --help", "logs --help", "status --help", "verify-data --help"]


@pytest.mark.parametrize("name", table.COMMANDS)
def test_every_command_exists_and_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = table.COMMANDS[name]
    assert callable(getattr(importlib.import_module(command.module), command.function))
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"  {name.ljust(13)}{command.summary}\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mointor"]) == 2
    assert capsys.readouterr().err == (
        "raypod: error: unknown command mointor; did you mean monitor?; raypod --help describes them\n"
    )
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: raypod COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "ray", "poptorch"} <= {*found}
    assert main(["--version"]) == 0
    assert main(["version", "all"]) == 2


def test_train_and_launch_are_the_modules_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (main, lambda words: train.main(words[1:])):
        assert run(["train", "--epohcs", "3"]) == 2
        assert (
            capsys.readouterr().err
            == "raypod: error: unknown flag --epohcs; did you mean --epochs?; raypod train --help lists all\n"
        )
    assert main(["launch", "--version"]) == 0
    assert capsys.readouterr().out.startswith("raypod")


@pytest.mark.parametrize("line", LIGHT)
def test_the_help_imports_neither_torch_nor_ray(line: str, tmp_path: Path) -> None:
    heavy = "sorted({'torch', 'ray', 'numpy', 'torchvision'} & set(sys.modules))"
    run = f"try: main({line.split()!r})\nfinally: print({heavy}, file=sys.stderr)"
    code = f"import sys; from raypod.__main__ import main\n{run}"
    words: List[str] = [sys.executable, "-c", code]
    ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stderr.decode().split("\n")[-2]) == (0, "[]")


FLAGS = {
    "monitor --intervall 3": "--intervall; did you mean --interval?; raypod monitor",
    "export --formt onnx": "--formt; did you mean --format?; raypod export",
    "up --wait-host=3": "--wait-host; did you mean --wait-hosts?; raypod up",
    "doctor --clutser f": "--clutser; did you mean --cluster?; raypod doctor",
    "version --zzz": "--zzz; raypod version",
}


@pytest.mark.parametrize("line", FLAGS)
def test_a_misspelt_flag_names_the_nearest(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"raypod: error: unknown flag {FLAGS[line]} --help lists all\n")


@pytest.mark.parametrize("name", [name for name in table.COMMANDS if name != "launch"])
def test_every_flag_of_every_command_is_described(name: str) -> None:
    for action in parser_of(table.COMMANDS[name].run)._actions:
        assert action.help, action


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_ends_early_is_no_traceback(flags: List[str]) -> None:
    line = [sys.executable, *flags, "-m", "raypod", "files", "pod64"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


def test_quiet_and_verbose_contradict_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-q", "-v", "--dry-run"]) == 2
    assert "--quiet and --verbose contradict each other" in capsys.readouterr().err
