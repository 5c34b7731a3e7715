"""The entrypoint of a Ray job, started as Ray does it, by a shell."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from raypod.system import job_driver
from tests.support.bounded import COMMAND_S, wait_until

CONFIG = {"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {"job_submission_id": "raypod-run-1"}}
OF_RAY = {"RAY_ADDRESS": "10.0.0.1:6379", job_driver.JOB_CONFIG: json.dumps(CONFIG)}
REPORT = """
import json, os, signal, sys
blocked = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
print(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:], os.getpid(), blocked]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(f"{folder}/socket")
        server.listen(1)
        server.settimeout(COMMAND_S)
        yield server


def start(listener: socket.socket, log: Path, output: Path, *command: str) -> subprocess.Popen[bytes]:
    words = ["exec", sys.executable, "-I", job_driver.__file__, listener.getsockname(), str(log), *command]
    line = " ".join(map(shlex.quote, words))
    with output.open("ab") as file:
        return subprocess.Popen(
            line,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **OF_RAY},
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]) and None,
        )


def send(listener: socket.socket, environment: Dict[str, str], folder: Path) -> int:
    """Act as the submitting process; return the pid at the other end."""
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1 << 12) == b"10.0.0.1:6379"
        connection.sendall(json.dumps({"environment": environment, "folder": str(folder)}).encode())
        pid, user = job_driver.peer_of(connection)
    assert user == os.getuid()
    return pid


def test_the_command_has_the_arguments_environment_and_folder_of_the_submitting_process(
    processes: None, listener: socket.socket, tmp_path: Path
) -> None:
    log, output, folder = tmp_path / "log", tmp_path / "output", tmp_path / "working folder"
    folder.mkdir()
    log.write_text("before\n")
    arguments: List[str] = ["a b", "c'd", "$HOME"]
    with start(listener, log, output, sys.executable, "-c", REPORT, *arguments) as process:
        sent = {"PATH": os.environ["PATH"], "SECRET": "12345", "RAY_ADDRESS": "other", "BYTES": "\udc80"}
        assert send(listener, sent, folder) == process.pid
        assert process.wait(COMMAND_S) == 7
    assert wait_until(lambda: "an error" in log.read_text() and "an error" in output.read_text())
    (printed,) = (line for line in output.read_text().splitlines() if line.startswith("["))
    environment, where, words, pid, blocked = json.loads(printed)
    assert json.loads(environment.pop(job_driver.JOB_CONFIG)) == {"metadata": CONFIG["metadata"]}
    environment.pop("LC_CTYPE", None)  # Python sets it in the C locale
    assert environment == {**sent, "RAY_ADDRESS": "10.0.0.1:6379"}
    assert (where, words, pid) == (str(folder), arguments, process.pid)
    assert signal.SIGINT not in blocked
    assert log.read_text() == "before\n" + output.read_text()


def test_the_last_lines_of_a_killed_command_are_not_lost(processes: None, listener: Any, tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "output"
    script = (
        "import os, signal; os.write(1, b'x' * 300000 + b'last'); os.kill(0, signal.SIGTERM); os.kill(os.getpid(), 9)"
    )
    with start(listener, log, output, sys.executable, "-c", f"import signal, os; os.setpgrp(); {script}") as process:
        send(listener, {}, tmp_path)
        assert process.wait(COMMAND_S) in (-signal.SIGTERM, -signal.SIGKILL)
    assert wait_until(lambda: log.read_bytes() == output.read_bytes() == b"x" * 300000 + b"last")


def test_without_the_submitting_process_it_ends_with_one_line(processes: None, tmp_path: Path) -> None:
    words = [sys.executable, "-I", job_driver.__file__, str(tmp_path / "none"), str(tmp_path / "log"), "command"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the command that submitted this job is not there any more" in line
    assert not (tmp_path / "log").exists()


def test_the_submission_id_of_an_environment() -> None:
    assert job_driver.submission_id_of(OF_RAY) == "raypod-run-1"
    for other in ({}, {job_driver.JOB_CONFIG: "{"}, {job_driver.JOB_CONFIG: "[]"}, {job_driver.JOB_CONFIG: "{}"}):
        assert job_driver.submission_id_of(other) is None
