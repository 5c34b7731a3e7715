"""The status of a launch, from the reports of its hosts, and `launch.json`."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from raypod.errors import ConfigError, ProgramFailed
from raypod.events import HostUsage
from raypod.launch import main
from raypod.observe.status import launch_status
from raypod.observe.status.endpoint import published
from raypod.observe.status.launch_status import LaunchFile, LaunchStatus, routes_of, scrape_response
from raypod.observe.status.token_server import TokenServer
from raypod.plan.cluster import LOCAL
from raypod.plan.layout import TOKEN_FILE
from raypod.plan.placement import Sizes, place
from raypod.runtime.launcher.records import STDERR, STDOUT, HostReport, ProgramEnd, ProgramUsage
from raypod.runtime.launcher.supervision import Interrupted
from raypod.system.process import process_start_ticks
from tests.support.faulty_disks import FlushedFiles

USAGE = HostUsage(0.5, 1, 2, 3, 4, 5, 6)


@pytest.fixture
def status() -> LaunchStatus:
    return LaunchStatus(place(LOCAL, Sizes(4, 2, 1)), ("python", "train.py", "--epochs", "3"))


def report(*chunks: Any, **fields: Any) -> HostReport:
    return HostReport(tuple(chunks), fields.pop("ends", ()), False, False, **fields)


def test_programs_from_their_start_to_their_end(status: LaunchStatus) -> None:
    before = status.snapshot()
    assert (before["kind"], before["phase"], before["command"][1]) == ("launch", "starting", "train.py")
    assert {each["state"] for each in before["instances"]} == {"starting"}
    status.add(0, report((0, STDOUT, b"one\ntwo\n"), (1, STDERR, b"\r 10%\r 20%\x1b[0m")))
    status.add(0, report(programs=(ProgramUsage(1, 77, 1.5),), usage=USAGE))
    first, second = status.snapshot()["instances"]
    assert (first["state"], first["last_line"], first["output_bytes"]) == ("running", "two", {"stdout": 8, "stderr": 0})
    assert (second["last_line"], second["pid"], second["cpu_s"], second["replicas"]) == ("20%", 77, 1.5, [2, 2])
    assert status.snapshot()["phase"] == "running"
    assert [usage["cpu_share"] for usage in status.snapshot()["hosts"].values()] == [0.5]
    status.add(0, report(ends=(ProgramEnd(1, 139, "killed by signal 11 (SIGSEGV)"),)))
    after = status.snapshot()
    assert (after["phase"], after["instances"][0]["state"]) == ("ending", "running")
    assert (after["instances"][1]["state"], after["instances"][1]["exit_code"]) == ("exited", 139)
    status.add(0, report((0, STDOUT, b"x" * 5000), (1, STDOUT, b"\na\x00b\xff \n\n")))
    assert [each["last_line"] for each in status.snapshot()["instances"]] == ["x" * 200, "ab\ufffd"]


def test_a_loss_of_power_keeps_the_file_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    with LaunchFile(tmp_path, ("python", "main.py"), ["a"]):
        assert flushed.survive(tmp_path / "launch.json")


def test_the_metrics_of_programs(status: LaunchStatus, tmp_path: Path) -> None:
    status.run_dir = str(tmp_path / "L")
    status.add(0, report((0, STDOUT, b"12345\n"), programs=(ProgramUsage(0, 7, 2.25),), usage=USAGE))
    status.add(0, report(ends=(ProgramEnd(1, 1, "exit code 1"),)))
    text, of = scrape_response(status).body.decode(), 'run="L",instance="{}",host="localhost"'
    assert f'raypod_program_output_bytes_total{{{of.format(0)},stream="stdout"}} 6\n' in text
    assert f"raypod_program_cpu_seconds_total{{{of.format(0)}}} 2.25\n" in text
    assert f"raypod_program_up{{{of.format(0)}}} 1\n" in text
    assert f"raypod_program_up{{{of.format(1)}}} 0\n" in text
    assert f"raypod_program_exit_code{{{of.format(1)}}} 1\n" in text
    assert 'raypod_host_cpu_ratio{run="L",host="localhost"} 0.5\n' in text
    assert 'raypod_info{run="L",kind="launch"' in text


@pytest.mark.parametrize(
    ("error", "state", "code", "message"),
    [
        (None, "done", 0, ""),
        (ProgramFailed(1, "h", "exit code 3", "log", 3), "failed", 3, "exit code 3"),
        (Interrupted(signal.SIGTERM), "interrupted", 143, ""),
    ],
    ids=["done", "failed", "signal"],
)
def test_launch_json_holds_the_endpoint_while_the_launch_runs_and_then_its_end(
    error: Optional[BaseException], state: str, code: int, message: str, tmp_path: Path
) -> None:
    status = LaunchStatus(place(LOCAL, Sizes(1, 1, 1)), ("true",))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(ProgramFailed, Interrupted))
        server = stack.enter_context(TokenServer(routes_of(status)))
        file = stack.enter_context(LaunchFile(tmp_path, ["true"], ["h"]))
        stack.enter_context(published(server, tmp_path, file))
        found: Dict[str, Any] = launch_status.read_launch_file(tmp_path) or {}
        assert (found["state"], found["status_port"]) == ("running", server.port)
        assert found["status_token_file"] == str(tmp_path / TOKEN_FILE)
        assert found["started_ticks"] == process_start_ticks(os.getpid())
        assert (found["command"], found["hosts"]) == (["true"], ["h"])
        if error is not None:
            raise error
    found = launch_status.read_launch_file(tmp_path) or {}
    assert (found["state"], found["exit_code"], "status_port" in found) == (state, code, False)
    assert message in found["message"]
    assert not (tmp_path / TOKEN_FILE).exists()


class Ignores:
    def serve_status(self, port: int, token_file: str) -> None:
        pass


def test_a_token_of_another_process_stays_and_one_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with TokenServer({}) as server:
        with published(server, tmp_path, Ignores()):
            (tmp_path / TOKEN_FILE).write_text("of the process that has taken over\n")
        assert (tmp_path / TOKEN_FILE).exists()
        (tmp_path / TOKEN_FILE).unlink()
        (tmp_path / TOKEN_FILE).symlink_to("elsewhere")
        context = published(server, tmp_path, Ignores())
        with pytest.raises(ConfigError, match=f"cannot write .*{TOKEN_FILE}: "):
            context.__enter__()


def test_a_port_in_use_or_a_wrong_one_is_one_line_before_anything_is_printed_or_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenServer({}) as server:
        assert main(["--print-topology=yes", "--status-port", str(server.port), "true"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert f"--status-port {server.port}: Address already in use; choose another port" in err
    for port in ("-1", "65536", "x"):
        assert main([f"--status-port={port}", "true"]) == 2
        assert "--status-port" in capfd.readouterr().err
