"""Tests of pod/program_check: a program on the emulated SDK until its first call."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, Dict

import psutil
import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.pod import program_check
from raypod.pod.findings import OK, TROUBLE, WARN, Finding
from raypod.pod.program_check import Outcome, conclude, render
from raypod.runtime.launcher.records import ProgramEnd
from tests.support.bounded import wait_until

FAILED, DONE = ProgramEnd(0, 1, "exit code 1"), ProgramEnd(0, 0, "exit code 0")
BEGUN: Dict[str, Any] = {"call": {"limit_s": 300.0}, "compilation": {}}
END = {"call_s": 1.0, "compile_s": 0.5, "micro_batches": 8}
REFUSED = Finding(TROUBLE, "main.py:3", "operator", "aten::tril: PopTorch does not support it")


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(), "no call of a PopTorch model within 9 s"),
        (Outcome(end=DONE), "ended without a call"),
        (
            Outcome(end=FAILED, last_line="ValueError: x"),
            r"failed before its first call \(exit code 1\): ValueError: x",
        ),
        (Outcome(end=ProgramEnd(0, 127, "cannot start x: No such file")), "--program: cannot start x: No such file"),
    ],
)
def test_a_program_without_a_call_is_a_mistake(outcome: Outcome, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conclude(outcome, 9.0)


@pytest.mark.parametrize(
    ("outcome", "level", "text"),
    [
        (Outcome(events={**BEGUN, "end": END}, end=DONE), OK, "the limit there is 300 s"),
        (Outcome(events={**BEGUN, "end": {**END, "call_s": 301.0}}), WARN, "an IPU ends calls of more than 300 s"),
        (Outcome(events=BEGUN), WARN, "not finished after 9 s"),
        (Outcome(events=BEGUN, end=ProgramEnd(0, 137, "killed by signal 9")), TROUBLE, "killed by signal 9"),
        (Outcome(events={"compilation": {}}, end=DONE), OK, "makes no call"),
    ],
)
def test_the_end_of_the_call_is_a_finding(outcome: Outcome, level: str, text: str) -> None:
    (found,) = conclude(outcome, 9.0)
    assert (found.level, text in found.text) == (level, True)


def test_trouble_comes_first_and_equal_findings_are_one_row() -> None:
    warning = Finding(WARN, "", "warning", "w")
    places = [Finding(TROUBLE, f"main.py:{line}", "operator", REFUSED.text) for line in (3, 4, 3)]
    found = conclude(Outcome([warning, *places], {**BEGUN, "end": END}, DONE), 9.0)
    header, row, *_, summary = render(found).splitlines()
    assert header.split() == ["what", "where", "finding"]
    assert "main.py:3, main.py:4  aten::tril" in row
    assert summary == "not ready: 1 ok, 1 warn, 2 trouble"


@pytest.mark.parametrize("words", [["--program", "a 'b"], ["--program="], ["--program", "a", "--timeout", "0"]])
def test_a_wrong_command_is_one_line(words: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


PROGRAM = """
import os, pathlib, subprocess, sys, tempfile, poptorch, torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.tril()

assert poptorch.ipuHardwareIsAvailable(2)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
tempfile.mkstemp()
pathlib.Path("facts").write_text(f"{child.pid} {tempfile.gettempdir()}")
model = poptorch.inferenceModel(Net())
while True:
    model(torch.ones(2, 2))
"""


def test_a_program_is_checked_for_one_call_and_leaves_nothing(
    processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program_check, "TIMEOUT_S", 200.0)
    Path("main.py").write_text(textwrap.dedent(PROGRAM))
    assert main(["doctor", "--program", "python main.py", "--json"]) == 2
    refused, *others = json.loads(capsys.readouterr().out)["findings"]
    assert (refused["level"], refused["where"], refused["what"]) == ("trouble", "main.py:6", "operator")
    assert [each["what"] for each in others] == ["memory", "call"]
    pid, folder = Path("facts").read_text().split()
    assert wait_until(lambda: not psutil.pid_exists(int(pid)))
    assert not Path(folder).exists()
    assert {each.name for each in tmp_path.iterdir()} == {"main.py", "facts"}
