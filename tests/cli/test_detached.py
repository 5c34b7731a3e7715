"""Runs in the background as processes and as Ray jobs, and runs whose coordinator died."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Optional

import psutil
import pytest

from raypod import train as train_here
from raypod.__main__ import main
from raypod.cli import detached as commands
from raypod.cli.detached import RayJob
from raypod.errors import ClusterError, ConfigError, RunError
from raypod.events import UpdateDone
from raypod.plan.cluster import LOCAL
from raypod.runs import lease, run_state
from raypod.runs.metrics import line_of
from raypod.runs.run_state import RunState
from raypod.runtime.workers import ray_jobs
from raypod.runtime.workers.ray_jobs import JobServer, find_job_server
from raypod.system import job_driver, process
from tests.support.bounded import COMMAND_S, wait_until

FLAGS = ["--fleet", "inline", "--device", "emulated", "--lr-schedule", "constant", "--checkpoint-every", "4 updates"]
FLAGS += ["--model", "tiny"]


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", str(folder), *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def state_of(folder: Path) -> RunState:
    state = run_state.read(folder)
    assert state is not None
    return state


@pytest.fixture
def detached(processes: None, tmp_path: Path) -> Iterator[Path]:
    """The folder of a long run that was started with --detach and is training."""
    folder = tmp_path / "run"
    try:
        done = train(folder, "--epochs", "400", "--detach")
        assert done.returncode == 0, done.stderr
        assert f"status|attach|stop {folder}" in done.stdout
        yield folder
    finally:
        state = run_state.read(folder)
        if state is not None and state.is_alive:
            os.kill(state.pid, signal.SIGKILL)
        assert state is None or wait_until(lambda: not psutil.pid_exists(state.pid) or not state.is_alive)


def test_status_attach_and_stop_of_a_detached_run(detached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert state_of(detached).is_alive
    assert os.getsid(state_of(detached).pid) == state_of(detached).pid  # a closed terminal does not end it
    assert main(["status", str(detached)]) == 0
    out = capsys.readouterr().out
    assert "state  running" in out
    assert f"pid {state_of(detached).pid}" in out
    assert train(detached, "--epochs", "400").returncode == 2  # a folder has one coordinator
    assert wait_until(lambda: (detached / "checkpoints" / "LATEST").is_file(), 60)
    assert wait_until(lambda: state_of(detached).eta_s is not None, 60)  # the file is written once a second
    assert main(["status", str(detached)]) == 0
    assert re.search(r" update  \d+ of \d+, [\d:]+ left\n +loss  [\d.]+, \d+ images/s\n", capsys.readouterr().out)
    assert main(["stop", str(detached)]) == 0
    assert "interrupted after update" in capsys.readouterr().out
    assert main(["attach", str(detached)]) == 130
    assert f"continue with --resume {detached}" in capsys.readouterr().out
    assert main(["status", str(detached)]) == 0
    assert main(["stop", str(detached)]) == 0
    assert "nothing to stop" in capsys.readouterr().out


def test_the_same_command_resumes_a_run_whose_coordinator_died(detached: Path, tmp_path: Path, capsys: Any) -> None:
    assert wait_until(lambda: (detached / "checkpoints" / "LATEST").is_file(), 60)
    state = state_of(detached)
    os.kill(state.pid, signal.SIGKILL)
    assert wait_until(lambda: not state.is_alive)
    assert main(["status", str(detached)]) == 1
    out = capsys.readouterr().out
    assert "coordinator died at update" in out
    assert " left\n" not in out
    assert main(["stop", str(detached)]) == 0
    died = re.compile(r"died at update (\d+)")
    assert died.findall(capsys.readouterr().out) == died.findall(out)
    assert main(["attach", str(detached)]) == 1
    assert died.findall(capsys.readouterr().err) == died.findall(out)
    # It may have been killed between a checkpoint and its entry in LATEST.
    newest = max(int(each.name.rpartition("-")[2]) for each in (detached / "checkpoints").glob("update-????????"))
    updates = str(newest + 6)
    again = train(detached, "--epochs", "400", "--updates", updates)
    assert again.returncode == 0, again.stderr
    assert f"from update {newest} on" in again.stdout
    reference = tmp_path / "reference"
    assert train_here.main([*FLAGS, "--run-dir", str(reference), "--epochs", "400", "--updates", updates]) == 0
    ended = [json.loads((run / "summary.json").read_text()) for run in (detached, reference)]
    assert ended[0]["weights_sha256"] == ended[1]["weights_sha256"]
    lines = [json.loads(line)["update"] for line in (detached / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, newest + 7))
    assert main(["verify-data", str(detached)]) == 0
    capsys.readouterr()


def test_an_error_at_the_start_of_a_detached_run_is_printed(processes: None, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--detach", "--model", "no_such_module:make")
    assert done.returncode != 0
    assert "no_such_module" in done.stderr.splitlines()[-1]


MISTAKEN = """
import time
import torch
from raypod import ConfigError

class Mistaken(torch.nn.Module):
    def __init__(self, *_, **__):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, images):
        time.sleep(1.0)  # the run has started
        raise ConfigError("a mistake")
"""


def test_a_mistake_that_the_first_call_of_a_detached_run_finds_leaves_nothing(
    processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), *sys.path])))
    done = train(tmp_path / "run", "--detach", "--model", "mistaken:Mistaken")
    assert (done.returncode, done.stderr) == (2, "raypod: error: a mistake\n")
    assert not (tmp_path / "run").exists()


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = [*FLAGS, "--run-dir", str(folder), "--updates", "2"]
    assert train_here.main(line) == 0
    assert train_here.main(line) == 2  # the run is complete
    left = dataclasses.replace(state_of(folder), state="running", exit_code=None, update=1, started_ticks=1)
    (folder / "state.json").write_text(json.dumps(dataclasses.asdict(left)))
    for path in (folder / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    assert train_here.main(line) == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert main(["verify-data", str(folder)]) == 0


STATE = RunState(os.getpid(), process.process_start_ticks(os.getpid()) or 0, "here", "running", 3, 10)


def test_a_reused_pid_is_not_the_run_and_one_elsewhere_cannot_be_stopped(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_state.socket, "gethostname", lambda: "here")
    assert STATE.is_alive
    assert not dataclasses.replace(STATE, started_ticks=STATE.started_ticks - 1).is_alive
    other = dataclasses.replace(STATE, host="far-away")
    assert not other.is_alive
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(other)))
    with pytest.raises(ConfigError, match="started on host far-away; stop it there"):
        commands.stop(tmp_path)


@pytest.mark.parametrize("case", ["no lease", "another lease", "another machine", "log not open", "log is a link"])
def test_stop_signals_no_process_that_does_not_hold_the_folder(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    signalled: List[int] = []
    monkeypatch.setattr(commands.os, "kill", lambda pid, number: signalled.append(pid))
    monkeypatch.setattr(commands, "_OPEN_WITHIN_S", 0.0)
    holder = lease.this_process()
    state = dataclasses.replace(STATE, host=holder.host)
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
    if case != "no lease":
        changed = {"another lease": {"started_ticks": 1}, "another machine": {"machine": "?"}}.get(case, {})
        (tmp_path / "lease-1.json").write_bytes(dataclasses.replace(holder, **changed).content())
    with (tmp_path / "other").open("w"):  # this process has it open, as the victim has some file open
        if case == "log not open":
            (tmp_path / "events.jsonl").write_text("")
        else:
            (tmp_path / "events.jsonl").symlink_to(tmp_path / "other")
        with pytest.raises(ConfigError, match=f"process {state.pid}, which state.json names, does not hold"):
            commands.stop(tmp_path)
    assert not signalled
    (tmp_path / "lease-2.json").write_bytes(holder.content())
    (tmp_path / "events.jsonl").unlink()
    with (tmp_path / "events.jsonl").open("a"):
        monkeypatch.setattr(RunState, "is_alive", property(lambda self: not signalled))
        assert commands.stop(tmp_path) == 0
    assert signalled == [state.pid]


@pytest.mark.parametrize("skew_s", [600.0, -600.0, 0.0])
@pytest.mark.parametrize("is_alive", [True, False])
def test_the_status_with_another_clock_observes_the_lease(
    skew_s: float, is_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, file = [1000.0], tmp_path / "lease-1.json"
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(STATE, host="far-away"))))
    file.write_bytes(dataclasses.replace(lease.this_process(), host="far-away").content())
    at_s = file.stat().st_mtime - skew_s - (0.0 if is_alive else 60.0)
    for path in (file, tmp_path / "state.json"):
        os.utime(str(path), (at_s, at_s))

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if is_alive:
            os.utime(str(file), (at_s + 5, at_s + 5))

    monkeypatch.setattr(lease, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    assert main(["status", str(tmp_path)]) == (0 if is_alive else 1)
    out = capsys.readouterr().out
    assert ("state  running\n" in out) == is_alive
    assert not is_alive or re.search(r"heartbeat  \d s ago", out)
    assert not is_alive or re.search(r"updated  \d s ago", out)


def test_stop_names_a_process_that_is_stopped_instead_of_waiting_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    signalled: List[int] = []
    stopped = iter([True, False, *(True for _ in range(1000))])  # first for a moment, as by a debugger
    monkeypatch.setattr(commands, "_signal", lambda run_dir, state, number: signalled.append(number))
    monkeypatch.setattr(run_state, "is_stopped", lambda pid: next(stopped))
    now_s = iter(range(10_000))
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda seconds: None))
    state = dataclasses.replace(STATE, host=run_state.socket.gethostname())
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
    with pytest.raises(RunError, match=rf"process is stopped \(SIGSTOP.* kill -CONT {STATE.pid}; or kill -KILL"):
        commands.stop(tmp_path)
    assert signalled == [signal.SIGINT]


@pytest.mark.parametrize("stopped", [True, False])
def test_the_status_of_a_stopped_coordinator_has_the_newest_update_on_disk(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_state.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(run_state, "is_stopped", lambda pid: stopped)
    state = dataclasses.replace(STATE, update=0, total_updates=40, eta_s=60.0)
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
    updates = [UpdateDone(number, 1, {"loss": 0.5}, 8 * number, 10.0, 1.0) for number in range(1, 33)]
    lines = [json.dumps(line_of(each)) for each in updates]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"update": 33, "ep')
    assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    if stopped:
        message = "state  running, but its process is stopped (SIGSTOP, SIGTSTP or a debugger); kill -CONT "
        assert f"{message}{os.getpid()}" in out
        assert " update  32 of 40\n        loss  0.500, 10 samples/s\n" in out
    else:  # the state of a process that runs is the newest one: a repair can have gone back
        assert " state  running\n" in out
        assert " update  0 of 40, 01:00 left\n" in out


@pytest.mark.parametrize("age_s", [-60, 60])
def test_the_status_has_no_newer_checkpoint_than_update(age_s: int, tmp_path: Path, capsys: Any) -> None:
    """The state can be older than the checkpoint; a newer one is right: a repair can have gone back."""
    state = dataclasses.replace(STATE, update=5, total_updates=40)
    (tmp_path / "state.json").write_text(json.dumps(dataclasses.asdict(state)))
    updates = [UpdateDone(number, 1, {"loss": 0.5}, 8 * number, 10.0, 1.0) for number in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line_of(each))}\n" for each in updates))
    checkpoint = tmp_path / "checkpoints" / "update-00000012"
    checkpoint.mkdir(parents=True)
    (tmp_path / "checkpoints" / "LATEST").write_text(f"{checkpoint.name}\n")
    written_s = (tmp_path / "state.json").stat().st_mtime - age_s
    os.utime(str(checkpoint), (written_s, written_s))
    main(["status", str(tmp_path)])
    assert f" update  {5 if age_s > 0 else 12} of 40\n" in capsys.readouterr().out


@pytest.mark.parametrize("pid", [-1, 0, None, "1"])
def test_a_state_without_a_process_is_not_alive(pid: object, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({**dataclasses.asdict(STATE), "pid": pid, "started_ticks": None}))
    assert run_state.read(tmp_path) is None


@pytest.mark.parametrize("verb", ["status", "attach", "stop"])
def test_a_folder_without_a_run_is_an_error(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: List[str] = []
    for words in ([verb], [verb, str(tmp_path / "nowhere")], [verb, str(tmp_path)]):
        assert main(words) == 2
        lines += capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert f"{tmp_path / 'nowhere'}: the run folder does not exist on {run_state.socket.gethostname()}" in lines[1]


@pytest.mark.parametrize("verb", ["status", "verify-data"])
def test_a_file_is_no_run_folder(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("")
    assert main([verb, str(ledger)]) == 2
    assert "ledger.jsonl: this is a file; name a run folder, as in runs/NAME" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert main([verb, str(ledger)]) == 2
    assert f"this is a file; name the run folder: raypod {verb} {tmp_path}\n" in capsys.readouterr().err


def test_a_run_in_the_source_folder_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = tmp_path / "raypod" / "source" / "runs" / "one"
    run.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["status", "runs/one"]) == 2
    assert capsys.readouterr().err.endswith(f" in {tmp_path}; did you mean {run}?\n")
    assert main(["status", "runs/two"]) == 2
    assert "did you mean" not in capsys.readouterr().err


CLUSTER = "127.0.0.1:6379"


@dataclasses.dataclass
class Scripted:
    """A job server, and what it was asked for."""

    url: str = ""
    cluster: str = CLUSTER  # of which it is
    answers: List[int] = dataclasses.field(default_factory=lambda: [200])  # to submissions; the last one repeats
    starts: bool = True
    submitted: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    stopped: List[str] = dataclasses.field(default_factory=list)
    process: Optional[subprocess.Popen[bytes]] = None

    def job(self) -> Dict[str, Any]:
        code = self.process.poll() if self.process is not None else None
        if self.process is None and not self.starts:
            return {"status": "FAILED", "message": "the runtime environment\n cannot be created"}
        status = "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"
        return {"status": status, "driver_exit_code": code}

    def next_answer(self) -> int:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def submit(self, job: Dict[str, Any]) -> None:
        self.submitted.append(job)
        if self.starts:
            config = json.dumps({"metadata": {"job_submission_id": job["submission_id"]}})
            variables = {**os.environ, "RAY_ADDRESS": self.cluster, job_driver.JOB_CONFIG: config}
            self.process = subprocess.Popen(job["entrypoint"], shell=True, env=variables, stdout=subprocess.DEVNULL)


@pytest.fixture
def server(processes: None) -> Iterator[Scripted]:
    scripted = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"ray_version": "2.60.0"} if self.path == "/api/version" else scripted.job())

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.endswith("/stop"):
                scripted.stopped.append(self.path.split("/")[-2])
            elif scripted.answers == [200]:
                scripted.submit(json.loads(content))
            code = 200 if self.path.endswith("/stop") else scripted.next_answer()
            self.reply({"text": "No available agent to submit job"}, code)

        def reply(self, content: Dict[str, Any], code: int = 200) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        scripted.url = f"http://127.0.0.1:{http.server_port}"
        try:
            yield scripted
        finally:
            http.shutdown()
            thread.join()
            if scripted.process is not None:
                scripted.process.kill()
                scripted.process.wait()


def submit(server: Scripted, folder: Path, script: str) -> RayJob:
    client = JobServer(server.url, CLUSTER)
    return RayJob(client, "my run", [sys.executable, "-c", script, "an argument"], folder / "log")


def test_a_job_has_the_environment_of_this_process(server: Scripted, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("A_SECRET", "12345")
    monkeypatch.chdir(tmp_path)
    script = "import os, sys; print(os.environ['A_SECRET'], os.getcwd(), sys.argv[1]); sys.exit(5)"
    with submit(server, tmp_path, script) as job:
        assert server.process is not None
        assert job.pid == server.process.pid
        assert job.poll() is None
        job.begin()
    assert wait_until(lambda: job.poll() is not None)
    assert job.poll() == 5
    log = tmp_path / "log"
    assert wait_until(lambda: log.is_file() and log.read_text() == f"12345 {tmp_path} an argument\n")
    (submitted,) = server.submitted
    assert "12345" not in json.dumps(submitted)
    assert submitted["submission_id"].startswith("raypod-my-run-")
    assert submitted["runtime_env"] == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "900"}}
    assert not server.stopped


def test_a_submission_is_repeated_while_the_agent_starts(server: Scripted, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_jobs, "_POLL_S", 0.01)
    server.answers = [500, 500, 200]
    with submit(server, tmp_path, "pass") as job:
        job.begin()
    assert wait_until(lambda: job.poll() == 0)
    server.answers = [500]
    monkeypatch.setattr(ray_jobs, "_READY_WITHIN_S", 0.1)
    with pytest.raises(RunError, match="answered 500: .*No available agent"):
        submit(server, tmp_path, "pass")


def test_a_job_that_is_not_begun_ends(server: Scripted, tmp_path: Path) -> None:
    with submit(server, tmp_path, "print('must not run')") as job:
        pass
    assert server.process is not None
    assert server.process.wait(COMMAND_S) == 2
    assert server.stopped == [job.submission_id]
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": [400]}, "the job server at http://127.0.0.1:[0-9]+ answered 400"),
        ({"starts": False}, "has ended at its start: the runtime environment cannot be created"),
        ({"cluster": "127.0.0.1:6380"}, "is the job server of another Ray cluster, 127.0.0.1:6380"),
        ({"submit": lambda job: None}, "Ray has not started job raypod-my-run-[0-9a-f]+ within 0.1 s"),
    ],
)
def test_a_job_that_cannot_start(server: Any, change: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_jobs, "_READY_WITHIN_S", 1.0)
    if "submit" in change:
        monkeypatch.setattr(commands, "_START_WITHIN_S", 0.1)
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(RunError, match=message) as caught:
        submit(server, tmp_path, "print('must not run')")
    assert "\n" not in str(caught.value)
    assert len(server.stopped) == 1
    assert not (tmp_path / "log").exists()


def test_a_run_whose_job_cannot_start_is_a_process(server: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    server.starts = False
    monkeypatch.setattr(commands, "_job_server", lambda plan, way: (JobServer(server.url, CLUSTER), ""))
    flags = ["--device", "emulated", "--fleet", "inline", "--num-instances", "1", "--model", "tiny", "--updates", "2"]
    run = tmp_path / "run"
    assert train_here.main([*flags, "--run-dir", str(run), "--detach-as", "ray-job"]) == 2
    assert "--detach-as ray-job: Ray job raypod-run-" in capsys.readouterr().err
    assert not run.exists()
    assert train_here.main([*flags, "--run-dir", str(run), "--detach"]) == 0
    assert "Not a Ray job: Ray job raypod-run-" in capsys.readouterr().out
    assert commands.attach(run) == 0
    state = run_state.read(run)
    assert state.submission_id is None
    with contextlib.suppress(ChildProcessError):  # a later Popen may have collected it
        os.waitpid(state.pid, 0)  # it is a child of the command, which is this process


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (None, "no Ray cluster runs on this host"),
        ("192.0.2.99:6379", "the head of the Ray cluster is another host, 192.0.2.99"),
    ],
)
def test_why_there_is_no_job_server(address: Optional[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "running_cluster", lambda configured: address)
    monkeypatch.setattr(ray_jobs.ray_admission, "join_environment", lambda address: {"RAY_AUTH_MODE": "disabled"})
    with pytest.raises(ClusterError) as caught:
        find_job_server(LOCAL)
    assert str(caught.value) == reason
