"""`raypod logs` of a run whose folder is not on a shared disk: a fake ssh runs the commands on this host."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, List, Tuple

import pytest

from raypod.__main__ import main
from raypod.observe.logs import remote
from raypod.plan.cluster import Cluster, Host, Ssh
from tests.support.bounded import wait_until
from tests.support.log_folders import Following, RunFolder, append, started

pytestmark = pytest.mark.usefixtures("processes")
CLUSTER = Cluster("pod", (Host("head", "127.0.0.1"), Host("far", "192.0.2.11"), Host("off", "192.0.2.12")))
SSH = """#!/bin/sh
for last; do before=$address; address=$word; word=$last; done
echo "$address" >> "$0.calls"
test "$address" = 192.0.2.12 && { echo "No route to host" >&2; exit 255; }
printf 'Welcome\\377 {\\n'; sh -c "$last"
"""


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuple[RunFolder, Path]:
    """The folder on the head, and the logs on the host `far`, on which instance 1 runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
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


def output(capfd: pytest.CaptureFixture[str]) -> Tuple[List[str], str]:
    out, err = capfd.readouterr()
    return [" ".join(line.split()) for line in out.splitlines()], err


def test_logs_on_other_hosts_are_merged_by_time(pod: Tuple[RunFolder, Path], capfd: Any, tmp_path: Path) -> None:
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
def test_the_times_of_a_host_with_another_clock_are_those_of_this_one(
    pod: Tuple[RunFolder, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path, ahead_s: int
) -> None:
    run, far = pod
    times = far / "instance-1.times"
    marks = [line.split() for line in times.read_text().splitlines()]
    times.write_text("".join(f"{float(unix_s) + ahead_s} {size}\n" for unix_s, size in marks))
    os.utime(str(far / "instance-1.log"), (120 + ahead_s, 120 + ahead_s))
    (tmp_path / "bin" / "date").write_text(f"#!/bin/sh\nexec /bin/date -d '{ahead_s} seconds' \"$@\"\n")
    (tmp_path / "bin" / "date").chmod(0o755)
    assert main(["logs", str(run.path), "--events", "none", "--since", "108"]) == 0
    assert output(capfd)[0][-2:] == ["instance 0 | zero", "instance 1@far | one b \u00e9"]
    assert main(["logs", str(run.path), "--instance", "1", "--events", "none", "--since", "125"]) == 0
    assert output(capfd)[0] == []


def test_a_large_log_is_fetched_in_parts_and_one_on_a_shared_disk_needs_no_ssh(
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


def test_an_unreachable_host_is_one_line(pod: Tuple[RunFolder, Path], capfd: pytest.CaptureFixture[str]) -> None:
    pod[0].placed(130, "repaired", ["off", "elsewhere"], [20, 21])
    assert main(["logs", str(pod[0].path), "--events", "none"]) == 0
    found, err = output(capfd)
    assert len(found) == 5
    assert err.splitlines() == [
        f"raypod: warning: host elsewhere is not in {pod[0].path}/plan.json; logs on it are not shown",
        "raypod: warning: host off: No route to host; the log of instance 0 there is not shown",
    ]


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
