"""`raypod --help` and the dispatch of subcommands."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest

from raypod.__main__ import main
from raypod.cli import table
from tests.support.run_folders import write_run

LIGHT = ["--help", "version --help", "logs --help", "status --help", "verify-data --help"]


@pytest.mark.parametrize("name", table.COMMANDS)
def test_every_command_and_every_flag_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = table.COMMANDS[name]
    assert command.parser().prog == f"raypod {name}"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"  {name.ljust(13)}{command.summary}\n" in text
    assert max(map(len, text.splitlines())) <= 80
    if name != "launch":  # of poprun
        assert all(action.help for action in command.parser()._actions)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "ray", "poptorch"} <= {*found}
    assert main(["--version"]) == 0
    assert main(["version", "all"]) == 2


def test_train_and_launch_are_the_modules_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-q", "-v", "--dry-run"]) == 2
    assert "--quiet and --verbose contradict each other" in capsys.readouterr().err
    assert main(["launch", "--version"]) == 0
    assert capsys.readouterr().out.startswith("raypod")


@pytest.mark.parametrize("command", ["status", "stop", "attach", "logs", "evaluate", "verify-data"])
def test_the_files_of_a_run_folder_cannot_control_the_terminal(command: str, tmp_path: Path, capfd: Any) -> None:
    bad = "a\x1b]0;title\x07b\x1b]52;c;cm0=\x1b\\c\x1b[2J\x9b2Jd\u202e"
    folder = tmp_path / bad
    write_run(folder)
    state = {"pid": 1, "started_ticks": 0, "host": socket.gethostname(), "state": "failed", "exit_code": 0}
    state.update(message=bad, samples_are=bad, loss=1.0, update=1, total_updates=1)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(f"data: {{dataset: {json.dumps(bad)}}}\n")
    (folder / "logs").mkdir()
    for name in ("coordinator", "instance-0"):
        (folder / "logs" / f"{name}.log").write_text(f"10 %\r{bad}\n")
    main([command, str(folder)])
    shown = "".join(capfd.readouterr())
    assert "abc" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown}


@pytest.mark.parametrize("line", LIGHT)
def test_the_help_imports_neither_torch_nor_ray(processes: None, line: str, tmp_path: Path) -> None:
    heavy = "sorted({'torch', 'ray', 'numpy', 'torchvision'} & set(sys.modules))"
    run = f"try: main({line.split()!r})\nfinally: print({heavy}, file=sys.stderr)"
    code = f"import sys; from raypod.__main__ import main\n{run}"
    words: List[str] = [sys.executable, "-c", code]
    ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stderr.decode().split("\n")[-2]) == (0, "[]")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "monitor --intervall 3",
            "unknown flag --intervall; did you mean --interval?; raypod monitor --help lists all",
        ),
        ("export --formt onnx", "unknown flag --formt; did you mean --format?; raypod export --help lists all"),
        ("up --wait-host=3", "unknown flag --wait-host; did you mean --wait-hosts?; raypod up --help lists all"),
        ("doctor --clutser f", "unknown flag --clutser; did you mean --cluster?; raypod doctor --help lists all"),
        ("version --zzz", "unknown flag --zzz; raypod version --help lists all"),
        ("train --epohcs 3", "unknown flag --epohcs; did you mean --epochs?; raypod train --help lists all"),
        ("report nowhere --output x else", "nowhere does not exist"),  # flags and words in any order
        ("mointor", "unknown command mointor; did you mean monitor?; raypod --help describes them"),
    ],
)
def test_a_misspelt_word_names_the_nearest(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"raypod: error: {message}\n")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: raypod COMMAND")


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_ends_early_is_no_traceback(processes: None, flags: List[str]) -> None:
    line = [sys.executable, *flags, "-m", "raypod", "files", "pod64"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    "words",
    [
        *("status {}", "stop {}", "logs {}", "logs {} --events all", "report {}", "verify-data {}", "evaluate {}"),
        *("average {}", "train --resume {} --dry-run", "monitor {} --once", "attach {}"),
    ],
)
def test_deeply_nested_files_of_a_run_folder_are_damaged_files(words: str, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    deep = "[" * 5_000 + "]" * 5_000
    checkpoint = folder / "checkpoints" / "update-00000020"
    checkpoint.mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "logs" / "coordinator.log").touch()
    for path in (checkpoint / "manifest.json", *folder.glob("*.json"), *folder.glob("*.jsonl")):
        path.write_text(f'{{"event": {deep}}}\n')
    (folder / "ledger.jsonl").write_text(deep)
    code = main(words.format(folder).split())
    assert code in (0, 1, 2)
    (folder / "config.yaml").write_text(f"task: {deep}\n")
    assert main(words.format(folder).split()) == code or words.startswith("train")
    capfd.readouterr()
