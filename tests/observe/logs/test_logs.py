"""`raypod logs` of folders on this host, and on others that a fake ssh reaches."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.observe.logs import remote
from raypod.observe.logs.sources import offset_of_tail, offset_since, parse_since
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.system.log_files import Mark
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.log_folders import Following, RunFolder, append, started


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two instances, a detached coordinator and events, between 100 and 200 seconds."""
    folder = RunFolder(tmp_path / "run")
    folder.log(0, "zero a\nzero b\n", 110)
    folder.log(1, "one a\n", 120)
    folder.event(130, "phase_begun", phase="training", update=0)
    folder.event(140, "instance_lost", instance=1, host="a", kind="died", cause="it\nbroke", activity="")
    folder.log(0, "zero c\nzero", 150)
    append(folder.path / "logs" / "coordinator.log", "first\n", 105)
    return folder


def lines(capsys: pytest.CaptureFixture[str]) -> List[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_all_sources_are_merged_by_time(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run.path)]) == 0
    found = lines(capsys)
    clock = found[4].partition("instance lost")[0]
    assert found == [
        "coordinator | first",
        "instance 0 | zero a",
        "instance 0 | zero b",
        "instance 1 | one a",
        f"{clock}instance lost: instance 1 on a died: it broke",
        "instance 0 | zero c",
        "instance 0 | zero",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--instance", "1"], ["one a"]),
        (["--instance", "0", "--instance", "1", "--tail", "1"], ["one a", "zero"]),
        (["--instance", "0,1", "--since", "115"], ["one a", "zero c", "zero"]),
        (["--instance", "0-1", "--since", "145"], ["zero c", "zero"]),
        (["--instance", "0", "--since", "160"], []),
        (["--events", "none", "--tail", "0"], []),
        (["--events", "none", "--tail", "2"], ["first", "one a", "zero c", "zero"]),
    ],
)
def test_what_is_shown(run: RunFolder, capsys: Any, flags: List[str], expected: List[str]) -> None:
    assert main(["logs", str(run.path), *flags]) == 0
    assert [line.partition(" | ")[2] for line in lines(capsys)] == expected


def test_the_events_of_a_run_whose_folder_is_not_utf8_are_shown(run: RunFolder, capfdbinary: Any) -> None:
    run.event(160, "checkpoint_saved", update=1, path="caf\udce9/update-1", weights_sha256="0" * 64, kept=True)
    assert main(["logs", str(run.path), "--events", "checkpoint_saved"]) == 0
    assert b"checkpoint saved: caf\\xe9/update-1 after update 1" in capfdbinary.readouterr().out


def test_events_are_chosen_by_kind_and_time_and_a_log_without_marks_is_shown_whole(run: RunFolder, capsys: Any) -> None:
    for flags, expected in (
        (["--events", "all"], ["phase begun", "instance lost"]),
        (["--events", "all", "--since", "135"], ["instance lost"]),
        (["--events", "phase_begun"], ["phase begun"]),
        (["--events", "all", "--tail", "1"], ["instance lost"]),
    ):
        assert main(["logs", str(run.path), "--instance", "1", *flags]) == 0
        found = [line for line in lines(capsys) if line.startswith("events")]
        assert [" ".join(line.split(":")[2].split()[1:]) for line in found] == expected
    (run.path / "logs" / "instance-0.times").unlink()
    for since, expected in (("140", 4), ("151", 0)):
        assert main(["logs", str(run.path), "--instance", "0", "--since", since]) == 0
        assert len(lines(capsys)) == expected


@pytest.mark.parametrize("instances", [5, "ab", None, [None], [{}], [{"instance": "x", "host": "h", "pid": 1}]])
def test_an_event_with_fields_of_a_wrong_type_is_one_warning(instances: object, tmp_path: Path, capsys: Any) -> None:
    folder = RunFolder(tmp_path / "run", Cluster("pod", (Host("head", "127.0.0.1"),)))
    folder.log(0, "zero\n", 110)
    folder.event(120, "run_started", instances=instances)
    folder.event(130, [])
    assert main(["logs", str(folder.path)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    expected = f"{folder.path}/events.jsonl names processes in an unknown form; their logs on other hosts are not shown"
    assert err == f"raypod: warning: {expected}\n"


def test_a_run_without_logs_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.event(130, "phase_begun", phase="training", update=0)
    for flags, which in ([], "no log"), (["--instance", "1"], "no log of these instances"):
        assert main(["logs", str(folder.path), *flags]) == 0
        text = f"raypod: warning: {which} in {folder.path}/logs; only a run under Ray and a launch write them\n"
        assert capsys.readouterr().err == text


def test_logs_of_a_launch_on_other_hosts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.log(0, "zero\n", 110)
    (folder.path / "launch.json").write_text(json.dumps({"hosts": ["127.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"]}))
    assert main(["logs", str(folder.path)]) == 0
    text = "raypod: warning: no log of instance {} here: look on host {}, as at {}/logs/instance-{}.log\n"
    found = sorted(capsys.readouterr().err.splitlines(keepends=True))
    expected = [("1, 2", "10.0.0.2", folder.path, 1), ("3", "10.0.0.3", folder.path, 3)]
    assert found == [text.format(*each) for each in expected]


def test_of_a_progress_bar_the_last_state_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.log(0, "\r 1 %\r 50 %\r\r\nsaved\r\n")
    assert main(["logs", str(folder.path)]) == 0
    assert lines(capsys) == ["instance 0 | 50 %", "instance 0 | saved"]


def test_the_folder_of_a_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "launch.yaml").write_text("num-instances: 11\n")
    for instance in (10, 2):
        append(tmp_path / "logs" / f"instance-{instance}.log", f"hello {instance}\n", 100)
    assert main(["logs", str(tmp_path)]) == 0
    assert lines(capsys) == ["instance 2 | hello 2", "instance 10 | hello 10"]
    assert main(["logs", str(tmp_path), "--instance", "3"]) == 2
    assert "--instance 3: the run has the instances 2, 10" in capsys.readouterr().err


def test_prefixes_have_colours_on_a_terminal_only(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["logs", str(run.path), "--instance", "1"]) == 0
    assert capfd.readouterr().out == "\x1b[33minstance 1 | \x1b[0mone a\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["logs", str(run.path), "--instance", "1"]) == 0
    assert capfd.readouterr().out == "instance 1 | one a\n"


def test_following_shows_what_is_added_and_ends_with_the_run(run: RunFolder) -> None:
    follow = Following(run)
    new = run.path / "new"

    def steps() -> None:
        assert wait_until(lambda: follow.sees("zero c"))
        run.log(0, " end\nbar\r50 %", 160)
        assert wait_until(lambda: follow.sees("zero end\n"))
        assert "bar" not in follow.out
        run.event(170, "repaired")
        assert wait_until(lambda: follow.sees("repaired"))
        (run.path / "logs" / "instance-1.log").write_text("1\n")  # truncated
        assert wait_until(lambda: follow.sees("instance 1  | 1\n"))
        append(new, "replaced\n")
        new.replace(run.path / "logs" / "instance-1.log")
        assert wait_until(lambda: follow.sees("instance 1  | replaced\n"))
        append(run.path / "logs" / "instance-2.log", "a new file\n")
        assert wait_until(lambda: follow.sees("instance 2  | a new file\n"))
        run.state(exit_code=3)

    assert follow(steps) == 3
    assert follow.out.endswith("instance 0  | 50 %\n")


def test_following_a_run_whose_coordinator_died_is_an_error(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    run.state()
    state = run.path / "state.json"
    state.write_text(state.read_text().replace('"started_ticks": ', '"started_ticks": 1'))
    assert main(["logs", str(run.path), "--follow", "--tail", "1"]) == 1
    out, err = capfd.readouterr()
    assert err == f"raypod: error: the coordinator of {run.path} died at update 7\n"
    assert "zero\n" in out


def test_ctrl_c_ends_following(run: RunFolder) -> None:
    follow = Following(run)

    def steps() -> None:
        assert wait_until(lambda: follow.sees("zero c"))
        os.kill(os.getpid(), signal.SIGINT)

    assert follow(steps) == 130


def test_a_closed_pipe_ends_following_although_nothing_is_added(processes: None, run: RunFolder) -> None:
    run.state()
    command = [sys.executable, "-m", "raypod", "logs", str(run.path), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stdout.readline().endswith(b"first\n")
        process.stdout.close()
        assert process.wait(COMMAND_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


@pytest.mark.parametrize(("text", "age_s"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800), ("0s", 0)])
def test_an_age_counts_from_now(text: str, age_s: float) -> None:
    assert time.time() - age_s <= parse_since(text) <= time.time() - age_s


def test_a_time_is_iso_or_unix() -> None:
    local = datetime.datetime(2026, 1, 31, 8, 0)
    assert parse_since("2026-01-31T08:00") == parse_since("2026-01-31 08:00:00") == local.timestamp()
    assert parse_since("2026-01-31T08:00:00Z") == parse_since("2026-01-31T09:00:00+01:00") == 1769846400.0
    assert parse_since("1769846400.5") == 1769846400.5


@pytest.mark.parametrize("text", ["", "ten", "-5", "10 m", "5w", "nan", "inf", "2026-13-01", "08:00"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="--since .*must be an age"):
        parse_since(text)


@pytest.mark.parametrize("content", [b"", b"\n", b"one", b"one\n", b"one\ntwo\n\nfour", b"a\nb\nc\n", b"x\n" * 70000])
@pytest.mark.parametrize("lines", [0, 1, 2, 3, 4, 65537, 100000])
def test_the_tail_is_the_last_lines(tmp_path: Path, content: bytes, lines: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    expected = b"".join(content.splitlines(keepends=True)[-lines:]) if lines else b""
    assert content[offset_of_tail(log, lines) :] == expected


def test_output_since_a_time_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo\nthree\n")
    os.utime(log, (100.0, 100.0))
    marks = [Mark(10.0, 4), Mark(20.0, 6)]  # the second one is within a line
    assert [offset_since(log, marks, at_s) for at_s in (5.0, 10.0, 20.0, 100.0)] == [0, 4, 4, 4]
    assert offset_since(log, marks, 100.5) == 14  # the file is older
    assert offset_since(log, [], 50.0) == 0


CLUSTER = Cluster("pod", (Host("head", "127.0.0.1"), Host("far", "192.0.2.11"), Host("off", "192.0.2.12")))
SSH = """#!/bin/sh
for last; do before=$address; address=$word; word=$last; done
echo "$address" >> "$0.calls"
test "$address" = 192.0.2.12 && { echo "No route to host" >&2; exit 255; }
printf 'Welcome\\377 {\\n'; sh -c "$last"
"""


@pytest.fixture
def pod(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuple[RunFolder, Path]:
    """The folder on the head, and the logs on the host `far`, on which instance 1 runs."""
    program(tmp_path / "bin" / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(remote, "_INTERVAL_S", 0.1)
    far = tmp_path / "it's far" / "logs"
    far.mkdir(parents=True)
    run = RunFolder(tmp_path / "run", cluster=CLUSTER, run_dir=far.parent)
    run.log(0, started(0, 10, "head") + "zero\n", 110)
    append(far / "instance-1.log", started(1, 11, "far") + "one a\n", 105)
    append(far / "instance-1.log", "one b \u00e9\n", 120)
    run.placed(100, "run_started", ["head", "far"], [10, 11])
    return run, far


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def output(capfd: pytest.CaptureFixture[str]) -> Tuple[List[str], str]:
    out, err = capfd.readouterr()
    return [" ".join(line.split()) for line in out.splitlines()], err


def test_logs_on_other_hosts_are_merged_and_a_lost_host_is_one_line(pod: Any, capfd: Any, tmp_path: Path) -> None:
    assert main(["logs", str(pod[0].path), "--events", "none"]) == 0
    assert output(capfd) == (
        [
            f"instance 1@far | {started(1, 11, 'far').strip()}",
            "instance 1@far | one a",
            f"instance 0 | {started(0, 10, 'head').strip()}",
            "instance 0 | zero",
            "instance 1@far | one b \u00e9",
        ],
        "",
    )
    before = (tmp_path / "bin" / "ssh.calls").read_text()
    assert set(before.split()) == {"192.0.2.11"}
    assert main(["logs", str(pod[0].path), "--instance", "0"]) == 0
    assert (tmp_path / "bin" / "ssh.calls").read_text() == before  # nothing is fetched that is not shown
    capfd.readouterr()
    pod[0].placed(130, "repaired", ["off", "elsewhere"], [20, 21])
    assert main(["logs", str(pod[0].path), "--events", "none"]) == 0
    found, err = output(capfd)
    assert len(found) == 5
    assert err.splitlines() == [
        f"raypod: warning: host elsewhere is not in {pod[0].path}/plan.json; logs on it are not shown",
        "raypod: warning: host off: No route to host; the log of instance 0 there is not shown",
    ]


def test_a_run_that_has_failed_in_its_start_has_logs_on_other_hosts(tmp_path: Path, capfd: Any) -> None:
    run = RunFolder(tmp_path / "run", cluster=CLUSTER)
    run.log(0, "zero\n", 110)
    assert main(["logs", str(run.path)]) == 0
    log = f"{run.path}/logs/instance-1.log"
    warning = f"raypod: warning: no log of instance 1 here: look on host far, as at {log}\n"
    assert output(capfd) == (["instance 0 | zero"], warning)
    assert main(["logs", str(run.path), "--instance", "0"]) == 0
    assert output(capfd)[1] == ""


@pytest.mark.parametrize("flags", [["--tail", "1"], ["--since", "115"]])
def test_only_what_is_shown_is_transferred(pod: Any, capfd: Any, monkeypatch: Any, flags: Any) -> None:
    fetched: List[str] = []
    fetch = remote._fetch_command
    monkeypatch.setattr(remote, "_fetch_command", lambda mirror: fetched.append(fetch(mirror)) or fetched[-1])
    assert main(["logs", str(pod[0].path), "--instance", "1", *flags]) == 0
    assert output(capfd) == (["instance 1@far | one b \u00e9"], "")
    skipped = len(started(1, 11, "far") + "one a\n")
    assert f"tail -c +{skipped + 1} " in fetched[0]


@pytest.mark.parametrize("ahead_s", [-300, 300])
def test_times_of_a_host_with_another_clock_are_those_of_this_one(
    pod: Tuple[RunFolder, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path, ahead_s: int
) -> None:
    run, far = pod
    times = far / "instance-1.times"
    marks = [line.split() for line in times.read_text().splitlines()]
    times.write_text("".join(f"{float(unix_s) + ahead_s} {size}\n" for unix_s, size in marks))
    os.utime(str(far / "instance-1.log"), (120 + ahead_s, 120 + ahead_s))
    program(tmp_path / "bin" / "date", f"#!/bin/sh\nexec /bin/date -d '{ahead_s} seconds' \"$@\"\n")
    assert main(["logs", str(run.path), "--events", "none", "--since", "108"]) == 0
    assert output(capfd)[0][-2:] == ["instance 0 | zero", "instance 1@far | one b \u00e9"]
    assert main(["logs", str(run.path), "--instance", "1", "--events", "none", "--since", "125"]) == 0
    assert output(capfd)[0] == []


def test_a_large_log_is_fetched_in_parts_and_a_shared_one_needs_no_ssh(
    pod: Tuple[RunFolder, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote, "_MAX_BYTES", 20)
    calls = tmp_path / "bin" / "ssh.calls"
    assert main(["logs", str(pod[0].path), "--instance", "1"]) == 0
    assert len(output(capfd)[0]) == 3
    calls.unlink()
    pod[0].log(1, started(1, 11, "far"), 105)
    assert main(["logs", str(pod[0].path), "--events", "none"]) == 0
    assert len(output(capfd)[0]) == 3
    assert not calls.exists()


@pytest.mark.parametrize("ssh", [Ssh(proxy_command="nc"), Ssh(user="-oProxyCommand=nc")])
def test_no_command_of_a_run_folder_is_executed(ssh: Ssh, pod: Any, tmp_path: Path, capfd: Any) -> None:
    plan = json.loads((pod[0].path / "plan.json").read_text())
    plan["cluster"]["ssh"] = dataclasses.asdict(ssh)
    (pod[0].path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "bin" / "ssh").write_text('#!/bin/sh\necho "$@" >> "$0.calls"\nexit 255\n')
    assert main(["logs", str(pod[0].path), "--events", "none"]) == 0
    err = output(capfd)[1]
    if ssh.user:
        assert not (tmp_path / "bin" / "ssh.calls").exists()
    else:
        assert "-- 192.0.2.11" in (tmp_path / "bin" / "ssh.calls").read_text()
        assert "the ssh_proxy_command in a run folder is not executed: use --cluster FILE" in err
        assert "ProxyCommand" not in (tmp_path / "bin" / "ssh.calls").read_text()


def test_following_copies_what_is_added_also_on_a_new_host(pod: Tuple[RunFolder, Path]) -> None:
    run, far = pod
    follow = Following(run)

    def steps() -> None:
        assert wait_until(lambda: follow.sees("one b"))
        append(far / "instance-1.log", "one c\n")
        assert wait_until(lambda: follow.sees("instance 1@far | one c\n"))
        append(far / "instance-0.log", started(0, 30, "far") + "zero again\n")
        run.placed(130, "repaired", ["far", "far"], [30, 11])
        assert wait_until(lambda: follow.sees("instance 0@far | zero again\n"))
        (far / "instance-1.log").write_text("anew\n")
        assert wait_until(lambda: follow.sees("instance 1@far | anew\n"))
        run.state(exit_code=0)

    assert (follow(steps, "--events", "none"), follow.out.count("one c")) == (0, 1)
