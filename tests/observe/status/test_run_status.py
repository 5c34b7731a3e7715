"""The status of a run, folded from the events of a scripted fleet, and that of a launch."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from raypod import events
from raypod.errors import ConfigError, ProgramFailed
from raypod.events import CallReport, HeartbeatReport, HostUsage, InstanceLost, InstanceStarted, PhaseBegun
from raypod.launch import main as launch_main
from raypod.observe.status.endpoint import published
from raypod.observe.status.launch_status import LaunchFile, LaunchStatus, routes_of, scrape_response
from raypod.observe.status.run_status import RunStatus, user_name
from raypod.observe.status.token_server import TokenServer
from raypod.plan.cluster import LOCAL
from raypod.plan.layout import LAUNCH, TOKEN_FILE
from raypod.plan.placement import Sizes, place
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.launcher.records import STDERR, STDOUT, HostReport, ProgramEnd, ProgramUsage
from raypod.runtime.launcher.supervision import Interrupted
from raypod.runtime.workers.fleet import Beat, FleetBroken
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.system.files import strict_json
from raypod.system.process import process_start_ticks
from tests.support.faulty_disks import FlushedFiles

USAGE = HostUsage(0.5, 1, 2, 3, 4, 5, 6)


class LosesOne(ScriptedFleet):
    was_repaired = False

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            if report.first_update == 1 and not self.was_repaired:
                loss = InstanceLost(1, "h1", "died", "its process died", "in call 2", "a stack", "instance-1.log")
                raise FleetBroken((loss,), "")
            yield report

    def repair(self, lost_instances: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        self.was_repaired = True
        return {0: 1}


def statuses(plan: Plan, fleet: ScriptedFleet) -> List[Tuple[Any, Dict[str, Any]]]:
    beat = HeartbeatReport(0, "in call 1", 2.0, 1, 0.5, True, 1.0, USAGE, "last line")
    status = RunStatus(plan, lambda: {0: Beat(beat, 0.0)})
    found: List[Tuple[Any, Dict[str, Any]]] = [(None, status.snapshot())]
    for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
        status.on_event(event)
        found.append((event, json.loads(strict_json(status.snapshot()))))
    return found


def test_a_repaired_run_from_its_start_to_its_end(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 4}, pod={"replicas": 4, "num_instances": 2})
    found = statuses(plan, LosesOne(plan))
    assert (found[0][1]["phase"], found[0][1]["update"], found[0][1]["eta_s"]) == ("starting", 0, None)
    phases = [event.phase for event, _ in found if isinstance(event, PhaseBegun)]
    assert phases == ["training", "repairing", "training", "saving", "evaluating", "ending"]
    states = [status["instances"][1]["state"] for _, status in found]
    assert states.index("lost") > states.index("training")
    assert states[-1] == "idle"
    last = found[-1][1]
    assert (last["update"], last["total_updates"], last["restarts"], last["generation"]) == (4, 4, 1, 2)
    assert last["repaired_unix_s"] >= last["started_unix_s"]
    assert (last["checkpoints"]["saved"], last["last_evaluation"]["update"]) == (1, 4)
    assert last["recent_updates"]["update"] == [1, 2, 3, 4]
    shown = [event["event"] for event in last["events"]]
    assert shown == ["run_started", "instance_lost", "repaired", "checkpoint_saved", "evaluation_done", "run_ended"]
    assert last["events"][1]["cause"] == "its process died"
    assert "stack" not in last["events"][1]
    assert "seconds" not in last["events"][0]
    assert last["events"][2]["seconds"] >= 0
    assert last["plan"]["total_updates"] == 4


def test_a_snapshot_has_heartbeats_usage_and_the_user(make: Any, monkeypatch: Any) -> None:
    plan = make(training={"updates": 2}, pod={"replicas": 4, "num_instances": 2})
    last = statuses(plan, ScriptedFleet(plan))[-1][1]
    first, second = last["instances"]
    assert (first["activity"], first["calls"], first["waits_for_others"]) == ("in call 1", 1, True)
    assert (first["log_line"], second["log_line"]) == ("last line", None)
    assert (second["activity"], second["calls"], second["heartbeat_age_s"]) == (None, 0, None)
    assert (first["replicas"], second["ipus"]) == ([0, 2], [2, 2])
    monkeypatch.delenv("USER", raising=False)
    assert user_name() == pwd.getpwuid(os.getuid()).pw_name
    assert [usage["cpu_share"] for usage in last["hosts"].values()] == [0.5]


def test_an_elastic_run_that_is_rolled_back_shows_no_repeated_updates(make: Any) -> None:
    status = RunStatus(make(pod={"replicas": 8, "num_instances": 4, "elastic": True}), dict)
    for number in (4, 5, 6):
        status.on_event(events.UpdateDone(number, 1, {"loss": 1.0 * number, "accuracy": 0.0}, 32 * number, 9.0, 2.0))
    status.on_event(events.EvaluationDone(10, {"loss": 1.0}, 6, 1))
    status.on_event(events.Repaired((0,), ("a",), "a checkpoint", 5, 2.0, 1, 2, (), ()))
    found = status.snapshot()
    assert (found["update"], found["metrics"]["loss"], found["last_evaluation"]) == (5, 5.0, None)
    assert found["recent_updates"]["update"] == [4, 5]


def test_a_run_that_changes_its_size_shows_its_new_instances(make: Callable[..., Plan]) -> None:
    status = RunStatus(make(pod={"replicas": 8, "num_instances": 4}), dict)
    instances = tuple(InstanceStarted(each, host, each, "emulated", "", 1, ()) for each, host in enumerate("abcd"))
    status.on_event(events.RunStarted("emulated", "", 0, 1, (), 1, instances))
    status.on_event(InstanceLost(3, "d", "died", "its process died", "", "", "instance-3.log"))
    status.on_event(events.Resized(5, 4, 2, 8, ("a", "b"), "host d is lost"))
    status.on_event(events.Repaired((0, 1), ("a", "b"), "a checkpoint", 5, 2.0, 1, 2, (), instances[:2]))
    found = status.snapshot()
    of_instances = [(each["host"], each["replicas"], each["ipus"]) for each in found["instances"]]
    assert of_instances == [("a", [0, 2], [0, 2]), ("b", [2, 2], [2, 2])]
    assert list(found["hosts"]) == ["a", "b"]
    assert [event["event"] for event in found["events"]][-2:] == ["resized", "repaired"]
    assert found["update"] == 5


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
def test_launch_json_holds_endpoint_and_end(error: Any, state: str, code: int, message: str, tmp_path: Path) -> None:
    status = LaunchStatus(place(LOCAL, Sizes(1, 1, 1)), ("true",))
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(ProgramFailed, Interrupted))
        server = stack.enter_context(TokenServer(routes_of(status)))
        file = stack.enter_context(LaunchFile(tmp_path, ["true"], ["h"]))
        stack.enter_context(published(server, tmp_path, file))
        found = json.loads((tmp_path / LAUNCH).read_text())
        assert (found["state"], found["status_port"]) == ("running", server.port)
        assert found["status_token_file"] == str(tmp_path / TOKEN_FILE)
        assert found["started_ticks"] == process_start_ticks(os.getpid())
        assert (found["command"], found["hosts"]) == (["true"], ["h"])
        if error is not None:
            raise error
    found = json.loads((tmp_path / LAUNCH).read_text())
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


def test_a_port_in_use_or_a_wrong_one_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenServer({}) as server:
        assert launch_main(["--print-topology=yes", "--status-port", str(server.port), "true"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert f"--status-port {server.port}: Address already in use; choose another port" in err
    for port in ("-1", "65536", "x"):
        assert launch_main([f"--status-port={port}", "true"]) == 2
        assert "--status-port" in capfd.readouterr().err
