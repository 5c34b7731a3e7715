"""What the monitor finds on this host: endpoints, run folders, logs and `gc-monitor`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from raypod.cli import detached
from raypod.observe.monitor import run_source, style, this_host
from raypod.observe.monitor.log_lines import LastLines, LogTail
from raypod.observe.monitor.model import Device, Run
from raypod.observe.monitor.run_source import RunFiles, with_log_lines
from raypod.observe.monitor.this_host import ThisHost
from raypod.observe.monitor.views import run_lines
from raypod.observe.status import endpoint
from raypod.observe.status.endpoint import Entry, snapshot_route
from raypod.observe.status.token_server import Query, Response, Route, TokenServer
from raypod.runs import run_state
from raypod.system.process import process_start_ticks
from tests.support.bounded import wait_until
from tests.support.monitor_models import instance, snapshot
from tests.support.run_folders import write_run


@pytest.fixture
def host() -> Iterator[ThisHost]:
    found = ThisHost(interval_s=0.1)
    found.start()
    yield found
    found.stop()


def append(path: Path, *records: Dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of an interrupted run with two instances."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    specs = [{"index": index, "host": "h", "replica_offset": index, "local_replicas": 1} for index in range(2)]
    plan = {"task": "language-model", "total_updates": 10, "updates_per_epoch": 5, "instances": specs}
    (path / "plan.json").write_text(json.dumps({**plan, "geometry": {"local_ipus": 2}}))
    update = {"epoch": 1, "loss": 2.0, "samples": 8, "samples_per_s": 80.0, "data_wait_share": 0.1, "time_s": 1.0}
    append(path / "metrics.jsonl", *({"update": index, **update} for index in (1, 2)))
    started = {"instances": [{"instance": 0, "host": "a", "pid": 5}, {"instance": 1, "host": "b", "pid": 6}]}
    append(
        path / "events.jsonl",
        {"unix_s": 1.0, "event": "run_started", "generation": 1, "first_update": 0, "device_line": "x", **started},
        {"unix_s": 2.0, "event": "call_times", "instances": [{"instance": 1, "p50_s": 0.5, "busy_ratio": 2.0}]},
        {"unix_s": 3.0, "event": "checkpoint_saved", "update": 2, "path": "/c/update-2"},
    )
    write_state(path)
    (path / "logs" / "instance-0.log").write_text("first\nlast\x1b[2J line\n\n")
    return path


def write_state(folder: Path, **changed: Any) -> None:
    state = {"pid": os.getpid(), "started_ticks": 1, "host": run_state.socket.gethostname(), "state": "interrupted"}
    state.update(update=2, total_updates=10, exit_code=130, **changed)
    (folder / "state.json").write_text(json.dumps(state))


def test_an_ended_run_is_read_from_its_files(folder: Path) -> None:
    run = RunFiles(folder).read()
    assert (run.state, run.exit_code, run.update, run.total_updates) == ("interrupted", 130, 2, 10)
    assert (run.metrics, run.samples_per_s, run.checkpoint_update) == ({"loss": 2.0}, None, 2)
    assert [(each.host, each.pid, each.first_ipu) for each in run.instances] == [("a", 5, 0), ("b", 6, 2)]
    assert run.instances[1].busy_ratio == 2.0
    assert [each.kind for each in run.events] == ["run_started", "checkpoint_saved"]
    assert run.series["loss"] == (2.0, 2.0)


def test_a_run_that_continued_on_one_host_has_its_instance(folder: Path) -> None:
    resized = {"replicas": 2, "gradient_accumulation": 2, "replicas_before": 4, "hosts": ["a"], "update": 1}
    append(
        folder / "events.jsonl",
        {"unix_s": 4.0, "event": "resized", "cause": "host b is lost", **resized},
        {"unix_s": 5.0, "event": "repaired", "instances": [{"instance": 0, "host": "a", "pid": 7}]},
    )
    (only,) = RunFiles(folder).read().instances
    assert (only.host, only.pid, only.first_replica, only.num_replicas) == ("a", 7, 0, 2)


def test_an_ended_run_has_the_mean_throughput_of_its_summary_in_its_unit(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "samples_are": "windows"}))
    assert style.rate(RunFiles(folder).read()) == ""  # the last update is no current throughput
    (folder / "summary.json").write_text(json.dumps({"samples_per_s": 70.0}))
    assert style.rate(RunFiles(folder).read()) == "mean 70 windows/s"
    (folder / "summary.json").write_text(json.dumps({"samples_per_s": 70.0, "tokens_per_s": 8960.0}))
    run = RunFiles(folder).read()
    assert style.rate(run) == "mean 8960 tokens/s"
    lines = "\n".join(line.plain for line in run_lines(run, 100.0, 0, (160, 40), ascii_only=True))
    assert "mean 8960 tokens/s" in lines
    assert "windows/s          80" in lines  # of the last update, beside the sparkline
    assert lines.count("windows/s") == 1  # no column of unknown throughputs


@pytest.mark.parametrize("event", ["process_started", "repaired"])
def test_a_log_of_before_the_start_or_the_last_repair_has_no_last_line(folder: Path, event: str) -> None:
    logs = [folder / "logs" / f"instance-{index}.log" for index in range(2)]
    for log in logs:
        log.write_text("CollectiveBroken\n")
        os.utime(str(log), (50.0, 50.0))
    files, lines = RunFiles(folder), LastLines()

    def shown() -> List[Any]:
        return [each.log_line for each in with_log_lines(files.read(), lines).instances]

    assert shown() == ["CollectiveBroken", "CollectiveBroken"]
    append(folder / "events.jsonl", {"unix_s": 60.0, "event": event})
    assert shown() == [None, None]
    with logs[1].open("a") as file:
        file.write("epoch 2\n")
    os.utime(str(logs[1]), (70.0, 70.0))
    assert shown() == [None, "epoch 2"]


def test_an_evaluation_of_abandoned_weights_is_not_shown(folder: Path) -> None:
    files, events = RunFiles(folder), folder / "events.jsonl"
    shown: List[Any] = []
    for record in (
        *({"event": "evaluation_done", "update": update, "metrics": {"loss": update}} for update in (2, 4)),
        {"event": "repaired", "update": 3, "instances": []},
        {"event": "evaluation_done", "update": 4, "metrics": {"loss": 0.5}},
        {"event": "run_started", "first_update": 0, "instances": []},
    ):
        append(events, {"unix_s": 4.0, **record})
        shown.append(files.read().evaluation)
    assert shown == [{"loss": 2}, {"loss": 4}, {"loss": 2}, {"loss": 0.5}, {}]


def test_only_what_is_new_is_read_and_a_repeated_update_replaces(folder: Path) -> None:
    files = RunFiles(folder)
    files.read()
    facts = {"epoch": 1, "samples": 8, "samples_per_s": 80.0, "time_s": 2.0}
    losses = ((3, None), (2, 1.5), (3, 1.0))
    changed = [{"update": update, **facts, "metrics": {"loss": loss}} for update, loss in losses]
    append(folder / "metrics.jsonl", *changed)
    write_state(folder, message="CheckpointDamaged")
    run = files.read()
    assert (run.update, run.message, run.series["loss"]) == (3, "CheckpointDamaged", (2.0, 1.5, 1.0))
    content = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**content, "state": "running", "exit_code": None}))
    assert files.read().state == "died"  # its coordinator was killed


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"instances": 3}'])
def test_damaged_files_do_not_matter(folder: Path, damage: str) -> None:
    for name in ("plan.json", "metrics.jsonl", "events.jsonl"):
        (folder / name).write_text(damage)
    assert RunFiles(folder).read().state == "interrupted"


@contextlib.contextmanager
def serving(run_dir: Path, answer: Route) -> Iterator[None]:
    """A registered endpoint of this process."""
    with TokenServer({"/status": answer}) as server, endpoint.registered(run_dir, server.port, server.token):
        yield


def runs_of(host: ThisHost) -> List[Run]:
    return host.poll()[1]


def test_a_run_is_followed_from_its_start_to_its_end(host: ThisHost, folder: Path) -> None:
    log = str(folder / "logs" / "instance-0.log")
    state = snapshot(run_dir=str(folder), instances=[instance(0, log_file=log)])
    assert runs_of(host) == []
    with serving(folder, snapshot_route(lambda: state)):
        assert wait_until(lambda: bool(runs_of(host)), 20)
        (run,) = runs_of(host)
        assert (run.update, run.problem, run.instances[0].log_line) == (250, None, "last line")
        assert run.user == run_source.user_name(os.getuid())  # not what the endpoint says
    (run,) = runs_of(host)
    assert (run.state, run.update, run.samples_are) == ("interrupted", 2, "images")


def test_a_process_that_does_not_answer_is_shown_with_its_last_state(host: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_source, "TIMEOUT_S", 0.2)
    frozen, thawed = threading.Event(), threading.Event()

    def answer(query: Query) -> Response:
        if frozen.is_set():
            assert thawed.wait(60)
        return Response(json.dumps(snapshot(run_dir=str(folder))).encode())

    def problem() -> str:
        return str([run.problem for run in runs_of(host)])

    with serving(folder, answer):
        try:
            assert wait_until(lambda: [run.update for run in runs_of(host)] == [250], 20)
            frozen.set()
            assert wait_until(lambda: f"process {os.getpid()} does not answer (for " in problem(), 20)
            (run,) = runs_of(host)  # polling does not wait for the process, which is frozen until the end
            assert (run.update, run.is_active) == (250, True)
        finally:
            frozen.clear()
            thawed.set()
        assert wait_until(lambda: problem() == "[None]", 20)


@pytest.mark.parametrize("answer", [b"[]", b"{", b"{}", b'{"run_dir": "/r", "instances": 3}'])
def test_an_endpoint_of_another_version(host: ThisHost, folder: Path, answer: bytes) -> None:
    with serving(folder, lambda query: Response(answer)):
        assert wait_until(lambda: bool(runs_of(host)), 20)
        (run,) = runs_of(host)
        assert "another version" in str(run.problem)
        assert run.update == 2  # of the files


def test_an_endpoint_that_is_gone_or_refuses(folder: Path) -> None:
    with TokenServer({}) as server:
        ticks = process_start_ticks(os.getpid()) or 0
        entry = Entry(os.getpid(), ticks, os.getuid(), str(folder), server.port, "wrong")
        with pytest.raises(run_source.http.client.HTTPException, match="401"):
            run_source.ask(entry, 20.0)
    following = run_source.LiveRun(entry, 0.1)
    try:
        assert following.first_try.wait(20)
        assert "Connection refused" in str(following.current().problem)  # type: ignore[union-attr]
    finally:
        following.stop()
        following.join()


def test_logs_end_with_their_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines, tail = LastLines(), LogTail(path, kept=2)
    assert (lines.of(str(path)), lines.of(None), tail.lines()) == (None, None, [])
    path.write_text("one\n10%\r20%\n\npart")
    assert (lines.of(str(path)), tail.lines()) == ("20%", ["20%", ""])
    path.write_text("x" * 9 + "\n" + "new\n" * 2000)
    assert LogTail(path, tail_bytes=6).lines() == ["new"]
    path.write_text("again\n")
    assert tail.lines() == ["again"]


FORMATS: List[Any] = [  # the format of gc-monitor's JSON is inferred: several shapes must work
    {"ipus": [{"id": "0", "pid": "12", "user": "eve", "command": "python\x1b[0m a.py"}, {"id": 1}]},
    {"cards": [{"ID": "x", "IPUs": [{"ID": 0, "PID": 12, "User": "eve", "Command": "python a.py"}, {"ID": 1}]}]},
    {"ipus": [{"id": 0}, {"id": 1}], "processes": [{"IPU ID": 0, "PID": 12, "user": "eve", "process": "python a.py"}]},
]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "gc-monitor").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "gc-monitor").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def devices_of_tool(wait_s: float) -> Any:
    tool = this_host.GcMonitor()
    tool.start()
    try:
        tool.wait(wait_s)
        return tool.devices
    finally:
        tool.stop()


@pytest.mark.parametrize("content", FORMATS, ids=["flat", "cards", "processes"])
def test_gc_monitor_is_asked_where_it_is_installed(
    processes: None, content: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(content))
    install(tmp_path, monkeypatch, f"test $1 = --json && cat {tmp_path}/answer.json")
    assert devices_of_tool(20) == (Device(0, 12, "eve", "python a.py"), Device(1))


@pytest.mark.parametrize("script", ["exit 1", "echo no JSON", "exec sleep 60"])
def test_a_gc_monitor_that_fails_or_hangs(processes: None, script: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(this_host, "_TIMEOUT_S", 0.5 if "sleep" in script else 20.0)
    install(tmp_path, monkeypatch, script)
    assert this_host.ask_gc_monitor() is None


def test_gc_monitor_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices_of_tool(1) is None
    assert this_host.parse_gc_monitor({"id": -1, "x": [{"id": True}, {"id": math.inf}]}) == ()


def test_a_run_folder_of_a_former_version_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (last, *_) = reversed(write_run(tmp_path / "old"))  # with metrics at the top level of their lines only
    run = RunFiles(tmp_path / "old").read()
    assert (run.state, run.update, run.metrics) == ("done", 60, {name: last[name] for name in ("loss", "accuracy")})
    assert detached.status(tmp_path / "old") == 0
    assert "done after update 60" in capsys.readouterr().out
