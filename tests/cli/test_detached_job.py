"""Detached runs as Ray jobs, with a scripted job server that starts the entrypoints by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest

from raypod import train
from raypod.cli import detached
from raypod.cli.detached import RayJob
from raypod.errors import ClusterError, RunError
from raypod.plan.cluster import LOCAL
from raypod.runs import run_state
from raypod.runtime.workers import ray_jobs
from raypod.runtime.workers.ray_jobs import JobServer, find_job_server
from raypod.system import job_driver
from tests.support.bounded import COMMAND_S, wait_until

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

        def log_message(self, *arguments: object) -> None:
            """Keep the output clean."""

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


def test_a_job_runs_the_command_with_the_environment_of_this_process(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_submission_is_repeated_while_the_agent_of_a_new_cluster_starts(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        monkeypatch.setattr(detached, "_START_WITHIN_S", 0.1)
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(RunError, match=message) as caught:
        submit(server, tmp_path, "print('must not run')")
    assert "\n" not in str(caught.value)
    assert len(server.stopped) == 1
    assert not (tmp_path / "log").exists()


def test_a_run_whose_job_cannot_start_is_a_process(server: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    server.starts = False
    monkeypatch.setattr(detached, "_job_server", lambda plan, way: (JobServer(server.url, CLUSTER), ""))
    flags = ["--device", "emulated", "--fleet", "inline", "--num-instances", "1", "--model", "tiny", "--updates", "2"]
    run = tmp_path / "run"
    assert train.main([*flags, "--run-dir", str(run), "--detach-as", "ray-job"]) == 2
    assert "--detach-as ray-job: Ray job raypod-run-" in capsys.readouterr().err
    assert not run.exists()
    assert train.main([*flags, "--run-dir", str(run), "--detach"]) == 0
    out = capsys.readouterr().out
    assert "Not a Ray job: Ray job raypod-run-" in out
    assert detached.attach(run) == 0
    state = run_state.read(run)
    assert state is not None
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


def test_a_wrong_way_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--device", "emulated", "--fleet", "inline", "--num-instances", "1", "--run-dir", str(tmp_path / "run")]
    for way, message in (("ray-job", "--fleet inline does not use Ray"), ("nohup", "invalid choice")):
        assert train.main([*flags, "--detach-as", way]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "run").exists()
