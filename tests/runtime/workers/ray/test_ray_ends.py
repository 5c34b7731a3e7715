"""How `raypod train` in a Ray session of its own ends, and the admission to a cluster with a token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, List

import psutil
import pytest

from raypod.errors import ClusterError
from raypod.pod import stop_cluster
from raypod.runs import run_state
from raypod.runtime.workers import gcs, ray_admission, ray_reaper
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.resume import newest_valid
from tests.support.bounded import COMMAND_S, GONE_WITHIN_S, ended_processes, wait_until

RAY = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--port=0", "--disable-usage-stats"]
SIZES = ["--num-cpus=2", "--object-store-memory=80000000", "--include-dashboard=false"]
NULL = subprocess.DEVNULL


@pytest.fixture
def start_command() -> Iterator[Callable[..., Any]]:
    """`start_command(folder, *flags)`: start a training, which ends with the test if that fails."""
    with ended_processes() as started:

        def start(folder: Path, *flags: str) -> Any:
            line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--epochs", "400", *flags]
            pipe = subprocess.PIPE
            line += ["--run-dir", str(folder)]
            started.append(subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
            return started[-1]

        yield start


def is_of_ray(process: psutil.Process) -> bool:
    """Tell Ray's processes from short-lived ones, as `uname` during an import in Python 3.8."""
    try:
        return any("ray" in Path(word).parts for word in process.cmdline())
    except psutil.Error:
        return False


def test_a_signal_to_the_group_ends_a_run_with_its_processes(start_command: Callable[..., Any], tmp_path: Path) -> None:
    for folder in (tmp_path / "starts", tmp_path / "trains"):
        command = start_command(folder)
        train = psutil.Process(command.pid)
        if folder.name == "starts":
            assert wait_until(lambda train=train: any(map(is_of_ray, train.children())))  # inside ray.init
        else:
            metrics = folder / "metrics.jsonl"
            assert wait_until(lambda file=metrics: file.is_file() and file.read_text().count("\n") > 3, COMMAND_S)
        started = train.children(recursive=True)
        command.send_signal(signal.SIGTERM)
        os.killpg(command.pid, signal.SIGTERM)  # `timeout` sends its signal to the process and to its group
        out, err = command.communicate(timeout=COMMAND_S)
        assert command.returncode == 130, err
        assert not psutil.wait_procs(started, timeout=GONE_WITHIN_S)[1]
    assert "SIGTERM received" not in err  # the stacks of Ray's own handler
    assert not (tmp_path / "starts" / "metrics.jsonl").exists()
    summary = json.loads((tmp_path / "trains" / "summary.json").read_text())
    assert summary["interrupted"]
    assert (Path(summary["checkpoint"]) / "manifest.json").is_file()
    assert summary["updates"] == len((tmp_path / "trains" / "metrics.jsonl").read_text().splitlines())
    assert f"Interrupted after update {summary['updates']}; continue with --resume" in out
    state = run_state.read(tmp_path / "trains")
    assert (state.state, state.exit_code) == (run_state.INTERRUPTED, 130)


@pytest.fixture
def head() -> Iterator[List[psutil.Process]]:
    """The processes of a cluster of one host; this process is not connected to it."""
    command = subprocess.Popen([*RAY, *SIZES], stdout=NULL, stderr=NULL, start_new_session=True)
    leaders = {command.pid: ray_reaper.process_of(command.pid)}
    try:
        assert command.wait(120) == 0
        yield [psutil.Process(pid) for pid in ray_reaper.members(leaders)]
    finally:
        ray_reaper.kill(leaders)
        with contextlib.suppress(FileNotFoundError):  # it did not start
            (Path(os.environ["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").unlink()


def test_a_lost_head_ends_it(head: List[psutil.Process], start_command: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = start_command(folder, "--checkpoint-every", "2 updates")
    assert wait_until(lambda: (folder / "checkpoints" / "LATEST").is_file() or command.poll() is not None, COMMAND_S)
    assert command.poll() is None, command.communicate()[1]
    (gcs,) = (process for process in head if "gcs_server" in process.name())
    gcs.kill()
    _, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 1
    (message,) = err.strip().splitlines()
    assert message.startswith("raypod: error: host ")
    assert ", the head of the Ray cluster, is lost: its GCS at " in message
    assert message.endswith(f", then continue with --resume {folder}")
    state = run_state.read(folder)
    assert (state.state, state.exit_code) == (run_state.FAILED, 1)
    newest, damaged = newest_valid(storage.checkpoints_folder(folder))
    assert newest is not None
    assert damaged == []


TOKEN = "ab" * 32
NAME = f"test-cluster-access-{os.getpid()}"  # unique, because all processes with this mark are ended
HAS_TOKENS = ray_admission.has_tokens(ray_admission.ray_version())


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a head that requires a token, if this Ray supports it. This user has none."""
    # A folder with a short name: the paths of Ray's sockets in it are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        token = Path(folder, "token")
        token.write_text(TOKEN)
        environment = {**os.environ, stop_cluster.MARK: NAME, "RAY_AUTH_MODE": "token", "RAY_TMPDIR": folder}
        environment.update(RAY_AUTH_TOKEN_PATH=str(token), RAY_enable_autoscaler_v2="0")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0", "--num-cpus=1"]
        command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=80000000"]
        command += ["--disable-usage-stats", "--dashboard-agent-listen-port=0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        try:
            assert done.returncode == 0, done.stdout + done.stderr
            monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", f"{folder}/none")
            yield Path(folder, "ray", "ray_current_cluster").read_text().strip()
        finally:
            assert stop_cluster.stop(NAME)["left"] == 0
        assert not stop_cluster.members(NAME)


def test_a_cluster_admits_hosts_with_its_token_and_version(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_TOKENS:  # since Ray 2.52
        assert gcs.check(tokens).state == gcs.REFUSED
        with pytest.raises(ClusterError, match=f"{tokens} requires a token, and this host has none: .*/none does"):
            ray_admission.join_environment(tokens)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "cd" * 32)
        with pytest.raises(ClusterError, match=f"{tokens} rejects the token of RAY_AUTH_TOKEN"):
            ray_admission.join_environment(tokens)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert ray_admission.join_environment(tokens) == {"RAY_AUTH_MODE": "token" if HAS_TOKENS else "disabled"}
    answer, own = gcs.check(tokens, TOKEN), tokens.rpartition(":")[0]
    assert (answer.state, answer.detail) == (gcs.ANSWERED, ray_admission.ray_version() if HAS_TOKENS else answer.detail)
    assert gcs.alive_addresses(tokens, TOKEN) == [own]
    assert gcs.wait_for_hosts(tokens, 0, [own, "10.9.9.9"]) == {"missing": ["10.9.9.9"], "error": ""}
    with monkeypatch.context() as patched:
        patched.setattr(ray_admission, "ray_version", lambda: "1.0.0")
        with pytest.raises(ClusterError, match=r"runs Ray 2\..*, and this host has 1\.0\.0; both must be equal"):
            ray_admission.join_environment(tokens)
    monkeypatch.setattr(gcs, "alive_addresses", lambda *_: ["10.9.9.9"])
    with pytest.raises(ClusterError, match=r"is not a host of the Ray cluster at .*; run this on one of 10\.9\.9\.9"):
        ray_admission.join_environment(tokens)
