"""How `raypod train` in a Ray session of its own ends: signals while Ray starts and later, and the loss of the head."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List

import psutil
import pytest

from raypod.runs import run_state
from raypod.runtime.workers import ray_reaper
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


def test_a_signal_to_the_process_group_ends_a_run_and_all_its_processes(
    start_command: Callable[..., Any], tmp_path: Path
) -> None:
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
    assert state is not None
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


def test_the_loss_of_the_head_ends_a_run_with_one_line(
    head: List[psutil.Process], start_command: Callable[..., Any], tmp_path: Path
) -> None:
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
    assert state is not None
    assert (state.state, state.exit_code) == (run_state.FAILED, 1)
    newest, damaged = newest_valid(storage.checkpoints_folder(folder))
    assert newest is not None
    assert damaged == []
