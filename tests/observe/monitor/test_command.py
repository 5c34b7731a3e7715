"""`raypod monitor` as a command: text, JSON, the live display in a pseudo-terminal, and errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from raypod.__main__ import main
from raypod.observe.monitor.live import parse_keys
from raypod.observe.status import endpoint
from raypod.observe.status.endpoint import snapshot_route
from raypod.observe.status.token_server import TokenServer
from tests.support import ROOT
from tests.support.monitor_models import snapshot

LIMIT_S = 60


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of a run that this process serves."""
    monkeypatch.setenv(endpoint.VARIABLE, str(tmp_path / "registry"))
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    state = snapshot(run_dir=str(folder))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(TokenServer({"/status": snapshot_route(lambda: state)}))
        stack.enter_context(endpoint.registered(folder, server.port, server.token))
        yield folder


def test_once_prints_the_pod_or_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once"]) == 0
    text = capsys.readouterr().out
    assert "a-run" in text
    assert re.search(r"\n10\.0\.0\.12  8/8 IPUs busy\n( +\d+ .*\n){8}", text)
    assert "\x1b" not in text
    assert main(["monitor", str(run_dir)]) == 0  # no terminal: as --once
    text = capsys.readouterr().out
    assert "update 250/1000" in text
    assert "1.90x slow" in text


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    content = json.loads(line)
    documentation = (ROOT / "docs" / "reference/observability.md").read_text()
    section = documentation.partition("## The monitor")[2].partition("\n## ")[0]
    (run,), host = content["runs"], content["hosts"][-1]
    found = [content, run, run["instances"][0], run["events"][0], host, host["ipus"][0], host["usage"]]
    assert not {key for each in found for key in each if f"`{key}`" not in section}
    assert [each["pid"] for each in host["ipus"]] == [1004, 1004, 1005, 1005, 1006, 1006, 1007, 1007]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-here"], "monitor nothing-here: the run folder does not exist"),
        (["."], "monitor .: the folder holds no run"),
        (["--cluster", "nothing.yaml"], "cannot read the cluster file nothing.yaml"),
        (["--interval", "0"], "--interval 0: must be from 0.1 to 60 seconds"),
        (["--interval", "nan"], "--interval nan: must be"),
        (["--follow"], "--follow needs --json"),
        (["--once", "--json"], "use one of them"),
        ([".", "--cluster", "x"], "RUN and --cluster exclude each other"),
        (["--bad"], "unknown flag --bad"),
    ],
)
def test_mistakes_are_one_line(arguments: Any, message: str, run_dir: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(run_dir.parent)
    assert main(["monitor", *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert message in error


def test_the_usage_shows_which_flags_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["monitor", "--help"])
    assert "[--once | --json [--follow]]" in capsys.readouterr().out


def command(*arguments: str) -> List[str]:
    return [sys.executable, "-m", "raypod", "monitor", *arguments]


def environment(**changed: str) -> Dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changed}


def test_the_json_stream_ends_with_its_reader(processes: None) -> None:
    line = command("--json", "--follow", "--interval", "0.1")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert first["unix_s"] < second["unix_s"]
        assert first["usage"]["cpu_share"] is not None  # `monitor --once --cluster` reads no further
        process.stdout.close()
        assert (process.wait(LIMIT_S), process.stderr.read()) == (0, b"")


class Screen:
    def __init__(self, *arguments: str, **changed: str) -> None:
        self.master, self.slave = pty.openpty()
        self.before: List[Any] = termios.tcgetattr(self.slave)
        streams = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        env = environment(**{"COLUMNS": "100", "LINES": "30", **changed})
        self.process = subprocess.Popen(command(*arguments), env=env, start_new_session=True, **streams)
        self.text = ""

    def see(self, pattern: str) -> bool:
        """Read until the new output matches."""
        deadline, start = time.monotonic() + LIMIT_S, len(self.text)
        while not re.search(pattern, self.text[start:]):
            if not select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self.text += os.read(self.master, 65536).decode(errors="replace")
        return True

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ends(self, code: int) -> bool:
        """Whether the process ends with a code, and the modes, the normal screen and the cursor are back."""
        assert self.see(r"\x1b\[\?1049l")
        assert self.process.wait(LIMIT_S) == code
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        same = termios.tcgetattr(self.slave) == self.before
        return same and self.text.rindex("\x1b[?1049l") > self.text.rindex("\x1b[?1049h") and "\x1b[?25h" in self.text


@contextlib.contextmanager
def terminal(*arguments: str, **changed: str) -> Iterator[Screen]:
    screen = Screen(*arguments, **changed)
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.master)
        os.close(screen.slave)


def test_the_live_display_reacts_to_keys_and_restores_the_terminal(processes: None, run_dir: Path) -> None:
    with terminal("--interval", "30") as screen:  # only keys make it draw within the test
        assert screen.see("a-run")
        screen.press("r")
        assert screen.see("update 250/1000")
        screen.press("\x1b[B")
        assert screen.see("1.90x slow")
        screen.press("l")
        assert screen.see("log of instance 1")
        screen.press("q")
        assert screen.ends(0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signals_end_it_and_restore_the_terminal(processes: None, number: int, code: int, run_dir: Path) -> None:
    with terminal(str(run_dir), NO_COLOR="1", PYTHONIOENCODING="ascii:replace") as screen:
        assert screen.see("update 250/1000")
        screen.process.send_signal(number)
        assert screen.ends(code)
        assert "━" not in screen.text
        assert not re.search(r"\x1b\[[\d;]*3[1-7]m", screen.text)


def test_the_keys_of_a_terminal() -> None:
    named = ["q", "up", "down", "page down", "tab", "enter", "x", "escape"]
    assert parse_keys("q\x1b[A\x1bOB\x1b[6~\t\r\x1b[1;5Cx\x1b") == named


def test_it_starts_without_torch_and_ray(processes: None) -> None:
    code = "import sys, raypod.observe.monitor.command; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
