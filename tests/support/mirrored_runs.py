"""Run folders without a training, the mirror with a scripted coordinator, its process, and what a storage holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import pytest
import torch

from raypod.plan import layout
from raypod.plan.metric import Metric
from raypod.runs.upload import mirror_record, remote_index
from raypod.runs.upload import process as mirror_process
from raypod.runs.upload.mirror_record import MirrorRecord
from raypod.runs.upload.remote_run import RemoteRun
from raypod.system.companion import Input, end_session, start_module
from raypod.system.remote import store as store_module
from raypod.system.remote.store import Store
from raypod.training.checkpoint import storage, writer
from raypod.training.checkpoint.format import Manifest, Retention
from tests.support.bounded import wait_until
from tests.support.storage_servers import Proxy, Server

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--lr-schedule", "constant"]
SMALL, LARGE = 3, 300_000  # numbers of a checkpoint's weights
ACCURACY = Metric("accuracy", "higher")
Fault = Callable[[str, str], None]


@dataclasses.dataclass
class Place:
    """A URL, its server, and the proxy that the URL goes through."""

    url: str
    server: Server
    proxy: Optional[Proxy] = None


def write_run(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("training:\n  seed: 1\n")
    (folder / "metrics.jsonl").write_text('{"update": 1}\n')
    (folder / "logs" / "instance-0.log").write_text("a line\n")
    (folder / "status-token").write_text("the token of the status endpoint")
    (folder / "lease-1.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"updates": 1}))
    return folder


def name_of(update: int) -> str:
    return f"update-{update:08d}"


def save(folder: Path, update: int, numbers: int = SMALL, keep: int = 9, accuracy: Optional[float] = None) -> str:
    values = torch.arange(numbers, dtype=torch.float32) + update
    tested = {} if accuracy is None else {"accuracy": accuracy}
    manifest = Manifest(update, 0, update, 1, {}, {}, {}, tested=tested)
    state = writer.State({"weight": values}, {"param_groups": []})
    return writer.write_checkpoint(folder / "checkpoints", manifest, state, Retention(keep)).path.name


class Script(Input):
    """A coordinator and its clock: when the mirror waits, the next step runs. The run ends after the last one.

    A step may return the name of a checkpoint that was saved.
    """

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps, self._saved = list(steps), []  # type: ignore[var-annotated]
        self.has_ended, self.now_s = not steps, 1000.0
        self.waits_s: List[float] = []

    def take(self) -> List[str]:
        taken, self._saved = self._saved, []
        return taken

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        assert len(self.waits_s) < 50, "the mirror does not end"
        self.now_s += timeout_s
        if self._steps:
            name = self._steps.pop(0)()
            self._saved += [name] if isinstance(name, str) else []
        self.has_ended = not self._steps

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def mirror(
    run: Path, url: str, *steps: Callable[[], object], kept: Optional[Retention] = None, script: Optional[Script] = None
) -> MirrorRecord:
    """Mirror a run in this process until its script ends; return what the mirror remembers."""
    script = script or Script(*steps)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mirror_process, "time", script)
        started = mirror_process.RunMirror(run, Store(f"{url}/{run.name}"), kept or Retention(3), f"writer of {run}")
        done = started.follow(script)
    found = mirror_record.read(run)
    assert done == found.is_complete
    return found


class FaultyStorage:
    """The file system of a folder. `fault` gets the name and the path of each operation, and may raise.

    The names are those of fsspec, "read", "half" after half of the bytes of a write, and "close" after all of them.
    """

    def __init__(self, file_system: Any, fault: Fault) -> None:
        self._file_system, self._fault = file_system, fault

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file_system, name)
        if name not in ("open", "mv", "rm_file", "rmdir", "makedirs"):
            return found

        def operation(*arguments: Any, **options: Any) -> Any:
            is_read = name == "open" and arguments[1] != "wb"
            self._fault("read" if is_read else name, str(arguments[0]))
            result = found(*arguments, **options)
            return result if name != "open" or is_read else _FaultyFile(result, str(arguments[0]), self._fault)

        return operation


class _FaultyFile:
    def __init__(self, file: Any, path: str, fault: Fault) -> None:
        self._file, self._path, self._fault = file, path, fault

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._fault("half", self._path)
        self._file.write(data[len(data) // 2 :])

    def close(self) -> None:
        self._file.close()
        self._fault("close", self._path)


@contextlib.contextmanager
def faults(fault: Fault) -> Iterator[List[str]]:
    """Let all storages have a fault within the context; yield the URLs of the connections."""
    connect, connected = store_module.connect, []  # type: ignore[var-annotated]

    def faulty(url: str) -> Any:
        connected.append(url)
        file_system, path = connect(url)
        return FaultyStorage(file_system, fault), path

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_module, "connect", faulty)
        yield connected


@contextlib.contextmanager
def mirroring(run: Path, url: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the process that mirrors a run folder; it is killed at the end of the context if it has not ended."""
    process = start_module("raypod.runs.upload.process", [str(run), url, *flags], run / "logs" / "storage.log")
    try:
        yield process
    finally:
        end_session(process)


def announce(process: subprocess.Popen[bytes], name: str) -> None:
    process.stdin.write(f"{name}\n".encode())
    process.stdin.flush()


def finish(process: subprocess.Popen[bytes], within_s: float = 90.0) -> int:
    """Tell the process that the run has ended; return its exit code."""
    process.stdin.close()
    return process.wait(within_s)


def reached(run: Path, checkpoints: int) -> bool:
    """Wait until a number of checkpoints is uploaded and nothing is left to do."""
    found = mirror_record.read
    return wait_until(lambda: found(run).checkpoints >= checkpoints and not found(run).pending)


def verified(url: str, run: str, target: Path) -> List[str]:
    """Copy all of a run from a storage; return the names of its checkpoints. Every file must be as it was written."""
    remote = RemoteRun(f"{url}/{run}", "--resume")
    target.mkdir()
    found, messages = remote.fetch_files(target, lambda name: True)
    assert not messages
    names = fetch_checkpoints(remote, target)
    assert storage.list_checkpoints(target / "checkpoints")[1] == []
    for each in storage.list_checkpoints(target / "checkpoints")[0]:
        storage.verify(each)
    return names


def whole_checkpoints(url: str, run: str, target: Path) -> List[str]:
    """Return the names of the checkpoints on a storage; each that has a manifest must be complete."""
    target.mkdir()
    return fetch_checkpoints(RemoteRun(f"{url}/{run}", "--resume"), target)


def fetch_checkpoints(remote: RemoteRun, target: Path) -> List[str]:
    assert remote.fetch_manifests(target) == []
    checkpoints, _ = storage.list_checkpoints(target / "checkpoints")
    for each in checkpoints:
        remote.fetch_checkpoint(each, each.path)
    return sorted(each.path.name for each in checkpoints)


def different_files(run: Path, copy: Path) -> Set[str]:
    kept = {"status-token", "lease-1.json", layout.STORAGE, "storage.lock", remote_index.NAME, "logs/storage.log"}
    paths = [path.relative_to(each) for each in (run, copy) for path in each.rglob("*") if path.is_file()]
    names = {path.as_posix() for path in paths} - kept
    others = {name for name in names if not all((each / name).is_file() for each in (run, copy))}
    others |= {name for name in names - others if (run / name).read_bytes() != (copy / name).read_bytes()}
    return others


def summary_of(run: Path) -> Dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))
