"""Run folders without a training, the process that mirrors them, and what a storage holds of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Optional, Union

import torch
from bounded import wait_until
from storage.storage_servers import Proxy, Server

import raypod
from raypod.checkpoint import storage, writer
from raypod.checkpoint.format import Checkpoint, Manifest, Retention
from raypod.errors import CheckpointDamaged
from raypod.storage import index, memory
from raypod.storage.memory import Memory
from raypod.storage.remote_run import RemoteRun
from raypod.storage.store import Store

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--lr-schedule", "constant"]
SMALL, LARGE = 3, 300_000  # numbers of a checkpoint's weights


@dataclasses.dataclass
class Place:
    """A URL, and for a server its process and the proxy that the URL goes through."""

    url: str
    server: Optional[Server] = None
    proxy: Optional[Proxy] = None


def write_run(folder: Path, name: str = "config.yaml") -> Path:
    """Write the small files of a run folder."""
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("training:\n  seed: 1\n")
    (folder / "metrics.jsonl").write_text('{"update": 1}\n')
    (folder / "logs" / "instance-0.log").write_text("a line\n")
    (folder / "status-token").write_text("the token of the status endpoint")
    (folder / "lease-1.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"updates": 1}))
    return folder


def save(folder: Path, update: int, numbers: int = SMALL, keep: int = 9, accuracy: Optional[float] = None) -> str:
    """Write a checkpoint; return its name."""
    values = torch.arange(numbers, dtype=torch.float32) + update
    tested = {} if accuracy is None else {"accuracy": accuracy}
    manifest = Manifest(update, 0, update, 1, {}, {}, {}, tested=tested)
    state = writer.State({"weight": values}, {"param_groups": []})
    return writer.write_checkpoint(folder / "checkpoints", manifest, state, Retention(keep)).path.name


@contextlib.contextmanager
def mirroring(run: Path, url: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process that mirrors a run folder; it is killed at the end of the context if it has not ended."""
    command = [sys.executable, "-m", "raypod.storage.process", str(run), url, *flags]
    environment = {**os.environ, "PYTHONPATH": str(Path(raypod.__file__).resolve().parent.parent)}
    with (run / "logs" / "storage.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[bytes], within_s: float = 90.0) -> int:
    """Tell the process that the run has ended; return its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(within_s)


def mirror(run: Path, url: str, *flags: str) -> Memory:
    """Mirror a run that has ended; return what its process remembers."""
    with mirroring(run, url, *flags) as process:
        code = finish(process)
    found = memory.read(run)
    assert code == 0, (found, (run / "logs" / "storage.log").read_text())
    return found


def reached(run: Path, checkpoints: int) -> bool:
    """Wait until a number of checkpoints is uploaded and nothing is left to do."""
    return wait_until(lambda: memory.read(run).checkpoints >= checkpoints and not memory.read(run).pending)


def verified(url: str, run: str, target: Path) -> List[str]:
    """Copy all of a run from a storage; return the names of its checkpoints. Every file must be as it was written."""
    remote = RemoteRun(f"{url}/{run}", "--resume")
    target.mkdir()
    found, messages = remote.fetch_files(target, lambda name: True)
    messages += remote.fetch_manifests(target)
    assert not messages
    assert found is not None
    checkpoints, damaged = storage.list_checkpoints(target / "checkpoints")
    assert not damaged
    for each in checkpoints:
        remote.fetch_checkpoint(each, each.path)
        storage.verify(each)
    return sorted(each.path.name for each in checkpoints)


def whole_checkpoints(url: str, run: str, target: Path) -> List[str]:
    """Return the names of the checkpoints on a storage; each that has a manifest must be complete."""
    target.mkdir()
    remote = RemoteRun(f"{url}/{run}", "--resume")
    assert remote.fetch_manifests(target) == []
    checkpoints, _ = storage.list_checkpoints(target / "checkpoints")
    for each in checkpoints:
        remote.fetch_checkpoint(each, each.path)
    return sorted(each.path.name for each in checkpoints)


def same_files(run: Path, copy: Path) -> bool:
    """Return whether a copy has all files of a run folder except those that stay on the host."""
    kept = {"status-token", "lease-1.json", memory.NAME, "storage.lock", index.NAME, "logs/storage.log"}
    folders = [
        {path.relative_to(each).as_posix() for path in each.rglob("*") if path.is_file()} for each in (run, copy)
    ]
    names = (folders[0] | folders[1]) - kept
    return all(name in folders[1] and (run / name).read_bytes() == (copy / name).read_bytes() for name in names)


def damaged(checkpoint: Union[Checkpoint, None]) -> bool:
    """Return whether a checkpoint is not as it was written."""
    assert checkpoint is not None
    try:
        storage.verify(checkpoint)
    except CheckpointDamaged:
        return True
    return False


def store_of(url: str, run: str) -> Store:
    return Store(f"{url}/{run}")
