"""The head of a Ray cluster is lost while a run uses the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List

import psutil
import pytest
from bounded import COMMAND_S, wait_until

from raypod.checkpoint import storage
from raypod.checkpoint.resume import newest_valid
from raypod.fleet import ray_reaper
from raypod.record import run_state

RAY = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--port=0", "--disable-usage-stats"]
SIZES = ["--num-cpus=2", "--object-store-memory=80000000", "--include-dashboard=false"]
NULL = subprocess.DEVNULL


@pytest.fixture
def head() -> Iterator[List[psutil.Process]]:
    """The processes of a cluster of one host; this process is not connected to it."""
    command = subprocess.Popen([*RAY, *SIZES], stdout=NULL, stderr=NULL, start_new_session=True)
    leaders = {command.pid: 0}
    try:
        assert command.wait(120) == 0
        yield [psutil.Process(pid) for pid in ray_reaper.members(leaders)]
    finally:
        ray_reaper.kill(leaders)
        (Path(os.environ["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").unlink()


def test_the_loss_of_the_head_ends_a_run_with_one_line(head: List[psutil.Process], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--epochs", "400", "--run-dir", str(folder)]
    command = subprocess.Popen(
        [*line, "--checkpoint-every", "2 updates"], stdout=NULL, stderr=subprocess.PIPE, text=True
    )
    try:
        assert wait_until((folder / "checkpoints" / "LATEST").is_file, 120)
        (gcs,) = (process for process in head if "gcs_server" in process.name())
        gcs.kill()
        _, err = command.communicate(timeout=COMMAND_S)
    finally:
        command.kill()
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


def test_an_error_that_the_loss_of_the_head_causes_is_not_reported() -> None:
    program = """
from raypod.fleet.ray_head import HeadWatch
watch = HeadWatch("127.0.0.1:9", "host a", "do b")
try:
    raise ConnectionError("of Ray")
finally:
    watch.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "raypod: error: host a is lost: its GCS at 127.0.0.1:9 does not respond (Connection refused), and Ray cannot "
        "continue without it; do b\n"
    )
