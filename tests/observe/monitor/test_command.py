"""`raypod monitor` as a command: text, JSON, the live display in a pseudo-terminal, and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
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
from raypod.observe.monitor import style
from raypod.observe.monitor.live import parse_keys
from raypod.observe.monitor.model import EVENTS, LOG, POD, RUN, EventLine, HostFacts, Pod, Screen, Usage
from raypod.observe.monitor.pod_source import build_pod
from raypod.observe.monitor.views import plain, render
from raypod.observe.status import endpoint
from raypod.observe.status.endpoint import snapshot_route
from raypod.observe.status.token_server import TokenServer
from tests.support import ROOT
from tests.support.monitor_models import instance, make_run, snapshot, usage
from tests.support.run_folders import write_run

LIMIT_S = 60


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a run that this process serves."""
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


def test_json_has_the_documented_keys(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    content = json.loads(line)
    documentation = (ROOT / "docs" / "reference/observability.md").read_text()
    section = documentation.partition("## The monitor")[2].partition("\n## ")[0]
    (run,), host = content["runs"], content["hosts"][-1]
    found = [content, run, run["instances"][0], run["events"][0], host, host["ipus"][0], host["usage"]]
    assert not {key for each in found for key in each if f"`{key}`" not in section}
    assert [each["pid"] for each in host["ipus"]] == [1004, 1004, 1005, 1005, 1006, 1006, 1007, 1007]


def test_json_of_a_named_run_lists_no_other(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(run_dir.parent / "ended")
    for folder in (run_dir, run_dir.parent / "ended"):
        assert main(["monitor", str(folder), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert [each["name"] for each in content["runs"]] == [folder.name]
        assert {each["run"] for each in content["hosts"][-1]["ipus"]} == {"a-run"}  # all that works there


def test_the_usage_shows_which_flags_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["monitor", "--help"])
    assert "[--once | --json [--follow]]" in capsys.readouterr().out


def command(*arguments: str) -> List[str]:
    return [sys.executable, "-m", "raypod", "monitor", *arguments]


def environment(**changed: str) -> Dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changed}


def test_the_json_stream_ends_with_its_reader(processes: None, run_dir: Path) -> None:
    line = command("--json", "--follow", "--interval", "0.1")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stderr is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert first["unix_s"] < second["unix_s"]
        assert first["usage"]["cpu_share"] is not None  # `monitor --once --cluster` reads no further
        process.stdout.close()
        assert (process.wait(LIMIT_S), process.stderr.read()) == (0, b"")


class Terminal:
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
def terminal(*arguments: str, **changed: str) -> Iterator[Terminal]:
    screen = Terminal(*arguments, **changed)
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


LOG_LINES = [f"line {index} of the log, and so on and on and on and on" for index in range(100)]


@pytest.fixture
def pod() -> Pod:
    facts = [HostFacts("10.0.0.11", num_ipus=8), HostFacts("10.0.0.12", num_ipus=8, problem="no data for 9 s")]
    return build_pod("two-hosts", 0.0, facts, [make_run(), make_run(run_dir="/runs/日本語", user="bob")])


def shown(pod: Pod, view: str, width: int = 120, height: int = 50, **screen: object) -> List[str]:
    lines = render(pod, Screen(view, "/runs/a", **screen), LOG_LINES, (width, height))  # type: ignore[arg-type]
    return [line.plain.rstrip() for line in lines]


@pytest.mark.parametrize("view", [POD, RUN, LOG, EVENTS])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_view_fits_every_size(pod: Pod, view: str, ascii_only: bool) -> None:
    empty = build_pod("empty", 0.0, [], [])
    for width, height in ((1, 1), (10, 3), (40, 10), (80, 24), (79, 17), (160, 50), (300, 9)):
        for model in (pod, empty):
            lines = render(model, Screen(view, shows_help=height == 17), LOG_LINES, (width, height), ascii_only)
            assert len(lines) == height
            assert max(line.cell_len for line in lines) <= width
            if ascii_only:
                assert all(line.plain.replace("日本語", "").isascii() for line in lines)


def test_names_of_others_cannot_control_the_terminal(pod: Pod) -> None:
    evil, run = "\x1b]0;title\x07\x9b2J", pod.runs[0]
    changed = dict.fromkeys(("host", "user", "program", "state", "phase", "message", "device_line"), evil)
    instances = tuple(dataclasses.replace(each, host=evil, state=evil, log_file=evil) for each in run.instances)
    run = dataclasses.replace(run, run_dir=f"/runs/{evil}", samples_are=evil, instances=instances, **changed)
    run = dataclasses.replace(run, evaluation={evil: 1.0}, events=(EventLine(0.0, evil, evil),))
    pod = build_pod(evil, 0.0, [HostFacts(evil, problem=evil)], [run])
    for view in (POD, RUN, LOG, EVENTS):
        screen = Screen(view, run.run_dir)
        lines = [*render(pod, screen, [evil], (120, 50)), *plain(pod, screen, 120)]
        assert all(line.plain.isprintable() for line in lines)


def test_the_pod_lists_each_ipu_or_each_instance(pod: Pod) -> None:
    lines = shown(pod, POD)
    assert "12/64 GB" in (line := next(line for line in lines if line.startswith("10.0.0.11")))
    assert "cpu 42 %" in line
    assert "16/16 IPUs busy" in line  # two runs
    assert next(line for line in lines if line.split()[:4:3] == ["5", "a"]).split() == [
        *("5", "training", "ada", "a", "2", "5", "1002", "image-classification")
    ]
    assert any("10.0.0.12  no data for 9 s" in line for line in lines)
    collapsed = shown(pod, POD, height=27)
    assert any(line.split()[:6] == ["4-5", "training", "ada", "a", "2", "4-5"] for line in collapsed)
    short = shown(pod, POD, height=12)
    assert any("more lines" in line for line in short)
    assert shown(pod, POD, height=12, scroll=3) != short


def test_the_run_shows_progress_and_its_instances_and_keeps_what_matters(pod: Pod) -> None:
    lines = shown(pod, RUN, width=160)
    text = "\n".join(lines)
    for words in ("update 250/1000  25 %  epoch 2/8", "ETA 5:00", "1280 images/s", "3 % waiting for data", "1 restart"):
        assert words in text
    assert "evaluated after 200: loss 0.4 accuracy 90.5" in text
    loss = next(line for line in lines if line.startswith("loss"))
    assert loss.split()[1:] == ["0.5", "█", "▃▁", "0.5", "to", "0.8", "in", "4", "updates"]
    ends = {line.rindex("updates") for line in lines if line.endswith(" in 4 updates")}
    assert len(ends) == 1  # aligned
    (slow,) = [line for line in lines if "slow" in line and "x" in line and "median" not in line]
    assert slow.startswith("7")
    assert "1.90x slow" in slow
    assert "died (last heartbeat: in call 9): signal 9" in text
    assert "repaired: instance 3 on 10.0.0.11, from instance 0; continues after update 9, 4.5 s" in text
    header = next(line for line in shown(pod, RUN, 80, 24) if line.lstrip().startswith("#"))
    assert header.split()[:8] == ["#", "host", "state", "images/s", "waits", "slowest", "busy", "beat"]


def test_a_repair_stays_in_the_run_view_of_a_long_run() -> None:
    kinds = ["repaired", *(["epoch_done", "checkpoint_saved"] * 40)]
    events = tuple(EventLine(float(index), kind, f"{kind} {index}") for index, kind in enumerate(kinds))
    pod = build_pod("one-host", 0.0, [], [dataclasses.replace(make_run(), events=events)])
    texts = [line.split("  ", 1)[1] for line in shown(pod, RUN) if line[2:3] == ":"]
    assert texts == ["repaired 0", "epoch_done 79", "checkpoint_saved 80"]
    assert sum("epoch_done" in line for line in shown(pod, EVENTS, height=200)) == 40


def test_a_lost_instance_and_a_silent_coordinator(pod: Pod) -> None:
    run = make_run(phase="repairing", instances=[instance(0, state="lost", heartbeat_age_s=40.0)])
    lines = shown(build_pod("p", 0.0, [], [run]), RUN)
    assert any(line.split()[:3] == ["0", "10.0.0.11", "1000"] and "lost" in line for line in lines)
    silent = dataclasses.replace(run, problem="process 999 does not answer (for 12 s)")
    lines = shown(build_pod("p", 0.0, [], [silent]), RUN)
    assert "no answer" in lines[1]
    assert "does not answer (for 12 s); what follows is the last known state" in lines[2]


def test_the_log_scrolls_and_plain_text_is_complete(pod: Pod) -> None:
    lines = shown(pod, LOG, instance=3)
    assert "log of instance 3 on 10.0.0.11: /runs/a/logs/instance-3.log" in "\n".join(lines)
    assert lines[-2].startswith("line 99 ")
    assert shown(pod, LOG, scroll=10)[-2].startswith("line 89 ")
    assert any(line.startswith("line 0 ") for line in shown(pod, LOG, scroll=10**6))
    of_pod, of_run = (plain(pod, screen, 160) for screen in (Screen(POD), Screen(RUN, "/runs/a")))
    assert len([line for line in of_pod if line.plain.split()[1:2] == ["training"]]) == 32 + 2
    assert of_run[-1].plain.endswith("accuracy 90.5 after update 200 on 360 samples")


def test_views_of_hosts_without_figures_and_of_many_instances() -> None:
    pod = build_pod("p", 0.0, [HostFacts("h"), HostFacts("i", Usage(**usage(cpu_share=None)))], [])
    lines = shown(pod, POD)
    assert "h  no IPU busy" in lines
    assert any("cpu -" in line for line in lines)
    assert any("no run of this user" in line for line in lines)
    pod = build_pod("p", 0.0, [], [make_run(instances=[instance(index % 8, instance=index) for index in range(64)])])
    lines = shown(pod, RUN, 80, 24, instance=63)
    assert any(line.startswith("63") for line in lines)
    assert any("more: up and down" in line for line in lines)


def test_an_unreachable_host_has_no_load_and_its_instance_is_under_the_host_to_which_it_was_moved() -> None:
    problem = "unreachable (ssh: connect to host 10.0.0.12 port 22: Connection refused)"
    facts = [HostFacts("10.0.0.11", num_ipus=4), HostFacts("10.0.0.12", num_ipus=4, problem=problem)]
    before = [instance(0), instance(4, state="lost")]
    lost = make_run(instances=before, hosts={"10.0.0.11": usage(), "10.0.0.12": usage()})
    lines = shown(build_pod("p", 0.0, facts, [lost]), POD)
    assert f"10.0.0.12  {problem}" in lines
    assert sum(line.split()[1:2] == ["lost"] for line in lines) == 2  # until the run has replaced it
    moved = make_run(instances=[instance(0), instance(4, host="10.0.0.11")], hosts={"10.0.0.11": usage()})
    lines = shown(build_pod("p", 0.0, facts, [moved]), POD)
    after = lines.index(f"10.0.0.12  {problem}")
    assert not any(lines[after + 1 : -1])  # the last line lists the keys
    assert [line.split()[4] for line in lines[4:after] if "training" in line] == ["0", "0", "4", "4"]


def test_keys_change_the_screen_and_the_help_names_them(pod: Pod) -> None:
    screen = Screen()
    for key, view in (("r", RUN), ("l", LOG), ("e", EVENTS), ("p", POD), ("tab", RUN), ("enter", LOG), ("escape", POD)):
        screen = screen.pressed(key, pod)
        assert screen.view == view
    screen = screen.pressed("right", pod)
    assert screen.run(pod) == pod.runs[1]
    assert screen.pressed("right", pod).run(pod) == pod.runs[0]
    screen = screen.pressed("r", pod).pressed("down", pod).pressed("down", pod).pressed("up", pod)
    assert (screen.instance, screen.pressed("7", pod).instance) == (1, 7)
    assert screen.pressed("9", pod).instance == 7
    assert screen.pressed("page up", pod).instance == 0
    assert screen.pressed("l", pod).pressed("up", pod).scroll == 1
    assert screen.pressed("h", pod).shows_help
    assert screen.pressed("h", pod).pressed("x", pod) == screen
    assert screen.pressed("z", pod) == screen
    assert Screen().pressed("right", build_pod("p", 0.0, [], [])) == Screen()
    text = "\n".join(line.plain for line in render(pod, Screen(POD, shows_help=True), [], (80, 24)))
    assert "…" not in text
    assert "heartbeat" in text


def test_durations_numbers_sizes_shares_and_ages() -> None:
    seconds = (None, math.inf, 0.0, 0.9996, 59.96, 187.0, 7387.0, 273600.0, -1.0)
    texts = ["-", "-", "0 ms", "1.0 s", "1:00", "3:07", "2:03:07", "3 d 4 h", "0 ms"]
    assert [style.duration(each) for each in seconds] == texts
    values = (None, math.nan, -math.inf, 0.12345678, 123456.7, 0.0)
    assert [style.amount(each) for each in values] == ["-", "nan", "inf", "0.1235", "123457", "0"]
    sizes = (None, 999.0, 1000, 25.3e9, 2e18)
    assert [style.size(each) for each in sizes] == ["-", "999 B", "1.0 kB", "25 GB", "2000.0 PB"]
    assert [style.percent(each) for each in (None, 0.314, math.nan)] == ["-", "31 %", "-"]
    assert [style.age(each) for each in (None, 1.0, 12.3, 187.0)] == ["-", "now", "12 s", "3:07"]
    assert style.clock(None) == "--:--:--"


def test_a_sparkline_averages_groups_and_leaves_gaps_and_a_bar_has_its_width() -> None:
    assert style.sparkline([1, 2, 3, 4], 10) == "▁▃▆█"
    assert style.sparkline([0, 2, 4, 4], 2) == "▁█"
    assert style.sparkline([1.0, None, math.nan, 3.0], 4) == "▁  █"
    assert style.sparkline([2.0, 2.0], 4) == "▁▁"
    assert style.sparkline([None], 4) == style.sparkline([], 4) == style.sparkline([1.0], 0) == ""
    assert style.sparkline([1, 2, 3, 4], 10, ascii_only=True).isascii()
    values = [float(index % 2) for index in range(50)]
    assert style.sparkline([*values, 1e6], 51) == "▁█" * 25 + "█"  # an outlier does not flatten it
    assert [style.bar(share, 4, ascii_only=True) for share in (None, 0.5, 2.0)] == ["----", "##--", "####"]


def test_foreign_text_cannot_control_the_terminal_and_a_line_of_a_log_keeps_its_indentation() -> None:
    text = "10%\r 50% \x1b[31mred\x1b[0m\x1b]0;title\x07 a\x07\x08b\x9b2J\tc\x1b[?1049h"
    for foreign, clean in ((text, "50% red ab2J c"), ("done\r", "done"), ("a\u2028 b  c ", "a b c")):
        assert style.clean(foreign) == clean
    assert style.clean_line("    raise  \x1b[31mError\x1b[0m \n") == "    raise  Error"
    assert style.clean_line("\ta\u2028b\r\n") == "        a b"
