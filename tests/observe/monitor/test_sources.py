"""What the monitor finds: endpoints, run folders, logs and `gc-monitor` of this host, and of others over ssh."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from raypod.cli import detached
from raypod.observe.monitor import run_source, style, this_host
from raypod.observe.monitor.log_lines import LastLines, LogTail, RemoteLog
from raypod.observe.monitor.model import Device, HostFacts, Ipu, Pod, RateMeter, Run, Usage, from_json, to_json
from raypod.observe.monitor.pod_source import PodSource, RemoteHost, build_pod, collapsed, with_names
from raypod.observe.monitor.run_source import RunFiles, with_log_lines
from raypod.observe.monitor.this_host import ThisHost
from raypod.observe.monitor.views import run_lines
from raypod.observe.status import endpoint
from raypod.observe.status.endpoint import Entry, snapshot_route
from raypod.observe.status.token_server import Query, Response, Route, TokenServer
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.runs import run_state
from raypod.runtime import ssh
from raypod.system.files import strict_json
from raypod.system.process import process_start_ticks
from tests.support.bounded import wait_until
from tests.support.monitor_models import instance, make_run, snapshot, usage
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


def test_an_ended_run_is_read_from_its_files_and_has_its_mean_throughput(folder: Path) -> None:
    run = RunFiles(folder).read()
    assert (run.state, run.exit_code, run.update, run.total_updates) == ("interrupted", 130, 2, 10)
    assert (run.metrics, run.samples_per_s, run.checkpoint_update) == ({"loss": 2.0}, None, 2)
    assert [(each.host, each.pid, each.first_ipu) for each in run.instances] == [("a", 5, 0), ("b", 6, 2)]
    assert run.instances[1].busy_ratio == 2.0
    assert [each.kind for each in run.events] == ["run_started", "checkpoint_saved"]
    assert run.series["loss"] == (2.0, 2.0)
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


def test_a_run_that_continued_on_one_host_has_its_instance(folder: Path) -> None:
    resized = {"replicas": 2, "gradient_accumulation": 2, "replicas_before": 4, "hosts": ["a"], "update": 1}
    append(
        folder / "events.jsonl",
        {"unix_s": 4.0, "event": "resized", "cause": "host b is lost", **resized},
        {"unix_s": 5.0, "event": "repaired", "instances": [{"instance": 0, "host": "a", "pid": 7}]},
    )
    (only,) = RunFiles(folder).read().instances
    assert (only.host, only.pid, only.first_replica, only.num_replicas) == ("a", 7, 0, 2)


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


def test_a_silent_process_is_shown_with_its_last_state(host: Any, folder: Path, monkeypatch: Any) -> None:
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
def test_gc_monitor_is_asked_where_it_is_there(processes: None, content: Any, tmp_path: Path, monkeypatch: Any) -> None:
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


FACTS = [HostFacts(f"10.0.0.{last}", num_ipus=16) for last in (11, 12, 13)]


def test_ipus_work_for_the_instances_of_runs() -> None:
    first, second, third = build_pod("pod", 0.0, FACTS, [make_run()]).hosts
    assert [each.ipu for each in first.ipus] == list(range(16))
    assert first.ipus[5] == Ipu(5, "training", "ada", "a", 2, 5, "image-classification", 1002)
    assert [each.state for each in second.ipus].count("training") == 8
    assert {each.state for each in third.ipus} == {"idle"}
    assert [each.ipu for each in third.ipus] == list(range(32, 48))
    assert first.usage == Usage(**usage())  # from the heartbeats of the run
    run = make_run(instances=[instance(0, ipus=[0, 4]), instance(1, ipus=[4, 4], state="lost")])
    (host,) = build_pod("pod", 0.0, [HostFacts("10.0.0.11")], [run]).hosts[:1]
    assert [each.replica for each in host.ipus] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [each.state for each in host.ipus] == ["training"] * 4 + ["lost"] * 4
    assert [(first.ipu, last.ipu) for first, last in collapsed(host.ipus)] == [(0, 3), (4, 7)]


def test_hosts_of_runs_are_listed_without_a_cluster_file_and_ended_runs_use_no_ipu() -> None:
    ended = dataclasses.replace(make_run(run_dir="/runs/b"), state="done")
    pod = build_pod("vm", 0.0, [HostFacts("vm")], [ended, make_run()])
    assert [host.name for host in pod.hosts] == ["vm", "10.0.0.11", "10.0.0.12"]
    assert [run.name for run in pod.runs] == ["a", "b"]
    assert {each.run for host in pod.hosts for each in host.ipus} == {"a"}
    silent = dataclasses.replace(make_run(), problem="process 999 does not answer")
    assert {each.state for each in build_pod("vm", 0.0, [], [silent]).hosts[0].ipus} == {"no answer"}


def test_gc_monitor_names_the_ipus_and_the_programs_of_others() -> None:
    devices = (Device(0, 1000), Device(1), Device(2, 77, "eve", "python"), Device(3, 1000))
    run = make_run(instances=[instance(0)])
    (host,) = build_pod("pod", 0.0, [HostFacts("10.0.0.11", devices=devices)], [run]).hosts[:1]
    assert [(each.ipu, each.state, each.owner, each.replica) for each in host.ipus] == [
        (0, "training", "ada", 0),
        (1, "idle", "", None),
        (2, "busy", "eve", None),
        (3, "training", "ada", 1),
    ]


def test_names_of_hosts_are_those_of_the_pod_and_log_lines_those_of_heartbeats() -> None:
    run = make_run(host="head", instances=[instance(0, host="localhost"), instance(4)], hosts={"localhost": usage()})
    named = with_names(run, {"head": "10.0.0.11"})
    assert (named.host, [each.host for each in named.instances]) == ("10.0.0.11", ["10.0.0.11", "10.0.0.12"])
    assert list(named.hosts) == ["10.0.0.11"]
    run = make_run(instances=[instance(0, log_line="\x1b[31mwarning:\x1b[0m  slow disk"), instance(1)])
    assert [each.log_line for each in with_log_lines(run, LastLines()).instances] == ["warning: slow disk", None]


def test_json_contains_what_another_monitor_needs() -> None:
    facts = HostFacts("10.0.0.11", Usage(**usage()), (Device(0, 1000, "ada", "python"),))
    pod = build_pod("pod", 1.0, [facts], [make_run()])
    content = json.loads(strict_json(to_json(pod, facts)))
    assert from_json(content) == (facts, list(pod.runs))
    content["runs"][0]["added_later"] = content["usage"]["added_later"] = 1
    assert from_json(content) == (facts, list(pod.runs))
    assert content["hosts"][0]["ipus"][0]["pid"] == 1000


def test_rates_of_the_network() -> None:
    meter, found = RateMeter(), []  # type: ignore[var-annotated]
    for now_s, received in ((0.0, 100), (1.0, 100), (2.0, 500), (3.0, 500), (4.0, 10), (5.0, 10), (9.0, 10)):
        rated = meter.add("h", Usage(network_received_bytes=received, network_sent_bytes=received), now_s)
        found.append(rated.received_bytes_per_s)
    assert found == [None, None, 200.0, 200.0, None, None, 0.0]


def test_launches_have_programs() -> None:
    programs: List[object] = [
        {"instance": 0, "host": "h", "pid": 5, "state": "running", "exit_code": None, "last_line": "a\x1b[0mb"},
        {"instance": 1, "host": "h", "pid": None, "state": "exited", "exit_code": 3, "ipus": [1, 1], "last_line": ""},
    ]
    launch = make_run(kind="launch", command=["python", "train.py"], instances=programs, phase="running", hosts={})
    assert (launch.kind, launch.program, launch.state) == ("launch", "python train.py", "running")
    assert [(each.state, each.log_line) for each in launch.instances] == [("running", "ab"), ("exit code 3", None)]
    (host,) = build_pod("pod", 0.0, [HostFacts("h", num_ipus=2)], [launch]).hosts
    assert [(each.ipu, each.state) for each in host.ipus] == [(0, "idle"), (1, "idle")]


CLUSTER = Cluster("far", (Host("203.0.113.1", "203.0.113.1", 8), Host("203.0.113.2", "203.0.113.2", 8)), ssh=Ssh("u"))
FEED = "for last; do :; done; case $* in *113.2*) echo no route >&2; exit 255;; esac\n"


@pytest.fixture
def use_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> Callable[[str], None]:
    def use(script: str) -> None:
        (tmp_path / "ssh").write_text(f'#!/bin/sh\n{FEED}echo "$last" > {tmp_path}/asked\n{script}\n')
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return use


def feed(folder: Path, **changed: Any) -> None:
    facts = HostFacts("head")
    pod = build_pod("head", 0.0, [facts], [make_run(**{"host": "head", **changed})])
    (folder / "feed.json").write_text(strict_json(to_json(pod, facts)) + "\n")


def problems(pod: Pod) -> Dict[str, str]:
    return {host.name: str(host.problem) for host in pod.hosts}


def test_the_hosts_of_a_cluster_file_with_the_runs_of_their_monitors(use_ssh: Any, tmp_path: Path) -> None:
    feed(tmp_path, instances=[instance(0, host="localhost")], hosts={})
    use_ssh(f"echo 'Welcome {{'; cat {tmp_path}/feed.json; exec sleep 60")
    with PodSource(0.2, cluster=CLUSTER) as source:
        source.wait()
        pod = source.poll()
    assert "raypod monitor --json --follow --interval 0.2" in (tmp_path / "asked").read_text()
    assert problems(pod) == {"203.0.113.1": "None", "203.0.113.2": "unreachable (no route)"}
    (run,) = pod.runs
    assert (run.host, run.instances[0].host, run.problem) == ("203.0.113.1", "203.0.113.1", None)
    assert [[each.state for each in host.ipus] for host in pod.hosts] == [["training"] * 2 + ["idle"] * 6, []]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'No module named raypod' >&2; exit 1", "No module named raypod"),
        (r"printf 'u@h: Permission denied.\r\n' >&2; exit 255", "unreachable (u@h: Permission denied.)"),
        ("exit 255", "unreachable (ssh: no connection)"),
        ("exit 3", "the monitor there ended with exit code 3"),
        ('echo "{}"; echo "[1]"; echo "{"; exit 4', "the monitor there ended with exit code 4"),
        ("", "ssh: No such file or directory"),
    ],
)
def test_a_host_whose_monitor_fails(use_ssh: Any, script: str, problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    use_ssh(script)
    if not script:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    facts, runs, found = first_poll(CLUSTER)
    assert (facts.name, runs, found) == ("203.0.113.1", [], problem)


def first_poll(cluster: Cluster) -> Any:
    host = RemoteHost(cluster, cluster.hosts[0], 0.2)
    try:
        assert host.first_try.wait(20)
        return host.poll()
    finally:
        host.stop()
        host.join()


def test_a_passphrase_of_the_monitors_key_is_named(use_ssh: Any, tmp_path: Path, monkeypatch: Any) -> None:
    use_ssh("echo 'u@h: Permission denied (publickey).' >&2; exit 255")
    key = tmp_path / "key"
    key.touch()
    monkeypatch.setattr(ssh, "has_passphrase", lambda path: path == str(key))
    cluster = dataclasses.replace(CLUSTER, ssh=dataclasses.replace(CLUSTER.ssh, private_key=str(key)))
    assert f"(publickey). ({key} has a passphrase, and no ssh agent here has the key" in str(first_poll(cluster)[2])


def test_a_host_that_becomes_silent_keeps_its_last_state(use_ssh: Any, tmp_path: Path, monkeypatch: Any) -> None:
    feed(tmp_path)
    monkeypatch.setattr("raypod.observe.monitor.pod_source._SILENT_S", 0.3)
    use_ssh(f"cat {tmp_path}/feed.json; exec sleep 60")
    with PodSource(0.1, cluster=CLUSTER) as source:
        source.wait()
        assert wait_until(lambda: "no data for" in problems(source.poll())["203.0.113.1"], 20)
        (run,) = source.poll().runs
        assert "no data for" in str(run.problem)
        assert run.update == 250


def test_a_log_on_another_host_is_followed(use_ssh: Any, tmp_path: Path) -> None:
    log = tmp_path / "a log"
    log.write_text("one\n")
    use_ssh('exec sh -c "$last"')
    with PodSource(0.1, cluster=CLUSTER) as source:
        following = source.log(make_run(host="203.0.113.1"), str(log))
        try:
            assert wait_until(lambda: following.lines() == ["one"], 20)
            with log.open("a") as file:
                file.write("two\x1b[2J\n")
            assert wait_until(lambda: following.lines() == ["one", "two"], 20)
        finally:
            following.close()
        assert isinstance(source.log(make_run(host="elsewhere"), str(log)), LogTail)
    unreachable = RemoteLog(CLUSTER, CLUSTER.hosts[1], "/log")
    assert wait_until(lambda: unreachable.lines()[-1:] == ["(the connection has ended with exit code 255)"], 20)
    assert unreachable.lines()[0] == "no route"
    unreachable.close()


def test_the_facts_for_other_monitors_have_the_rates_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    received = iter((1000, 3000))
    source = PodSource(0.2)
    usage = lambda: Usage(network_received_bytes=next(received), network_sent_bytes=0)  # noqa: E731
    monkeypatch.setattr(source._this_host, "poll", lambda: (HostFacts("here", usage()), []))
    source.poll()
    assert source.facts.usage.received_bytes_per_s is None
    source.poll()
    assert (source.facts.usage.received_bytes_per_s or 0.0) > 0.0
