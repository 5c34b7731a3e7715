"""Send a checkpoint of this host, with the files of its run, to a `CopyReceiver` on another host.

All files are opened before the first one is sent: a checkpoint that is removed meanwhile is sent to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterator, NamedTuple, Optional

from raypod.plan import layout
from raypod.runs import event_log, run_state
from raypod.runtime.coordinator.copy_targets import Abandoned
from raypod.system.command_line import INTERRUPTED
from raypod.system.files import parse_json, replace_file, strict_json
from raypod.training.checkpoint import storage, transfer
from raypod.training.checkpoint.copies import Age
from raypod.training.checkpoint.format import Checkpoint, Retention
from raypod.training.checkpoint.transfer import CheckpointSender, Requests, Server

_LINES = ".jsonl"


class Part(NamedTuple):
    """The first `size_bytes` bytes of an open file."""

    file: BinaryIO
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Source:
    """What is sent: a checkpoint, and the run folder as it is at one moment."""

    run_dir: Path
    checkpoint: Checkpoint
    tensors: Dict[str, Part]
    files: Dict[str, Part]
    state: bytes  # of state.json: a run that was interrupted after the checkpoint

    @property
    def age(self) -> Age:
        """The generation and update, which order the checkpoints of a run."""
        return self.checkpoint.manifest.generation, self.checkpoint.update


def run_id(run_dir: Path) -> str:
    """Return the name of a run on other hosts, which stays the same when it resumes; choose one for a new run.

    Raises:
        OSError: it cannot be written into the run folder.
    """
    path = run_dir / layout.COPIES
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(parse_json(path.read_text())["run_id"])
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_dir.resolve().name).lstrip(".")[:60]
    chosen = f"{name or 'run'}-{uuid.uuid4().hex[:8]}"
    replace_file(path, (json.dumps({"run_id": chosen}) + "\n").encode())
    return chosen


@contextlib.contextmanager
def opened(run_dir: Path, path: Path, folder: Optional[Path] = None) -> Iterator[Source]:
    """Open a checkpoint and the files of its run, which are in `folder` (default: the run folder).

    Raises:
        CheckpointDamaged: its manifest cannot be read.
        OSError: a file is missing, as if the checkpoint was removed meanwhile.
    """
    with contextlib.ExitStack() as stack:
        checkpoint = storage.read_manifest(path)
        tensors = {
            name: Part(stack.enter_context((path / name).open("rb")), record.size_bytes)
            for name, record in checkpoint.manifest.files.items()
        }
        files = {}
        for name in layout.names("copy"):
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context(((folder or run_dir) / name).open("rb"))
                files[name] = Part(
                    file, _whole_lines(file) if name.endswith(_LINES) else os.fstat(file.fileno()).st_size
                )
        yield Source(run_dir, checkpoint, tensors, files, _interrupted_state(folder or run_dir, checkpoint))


def send(server: Server, source: Source, run: str, timeout_s: float, is_abandoned: Callable[[], bool]) -> None:
    """Send a copy within a timeout. It is complete on the other host's disk, and verified there, or absent.

    Raises:
        OSError: the other host's file system, or it does not respond.
        Abandoned: `is_abandoned()` has returned true.
    """
    deadline_s = time.monotonic() + timeout_s
    manifest = source.checkpoint.manifest
    sender = CheckpointSender(server, manifest.update, timeout_s)
    for name, part in source.tensors.items():
        with sender.new_file(name) as target:
            for data in _chunks(part, is_abandoned):
                target.write(data)
    sender.commit(manifest, Retention(1))
    requests = Requests(server, max(0.0, deadline_s - time.monotonic()))
    expected = {layout.STATE: hashlib.sha256(source.state).hexdigest()}
    requests.add("write_file", layout.STATE, source.state)
    for name, part in source.files.items():
        digest = hashlib.sha256()
        requests.add("write_file", name, b"")  # an empty file is a file, too
        for data in _chunks(part, is_abandoned):
            digest.update(data)
            requests.add("write_file", name, data)
        expected[name] = digest.hexdigest()
    facts: Dict[str, Any] = {
        "run_id": run,
        "run_dir": str(source.run_dir),
        "checkpoint": source.checkpoint.path.name,
        "raypod": event_log.raypod_version(),
        "written_unix_s": time.time(),
    }
    requests.add("finish", facts, expected)
    requests.finish()


def _chunks(part: Part, is_abandoned: Callable[[], bool]) -> Iterator[bytes]:
    """Read the part of a file in pieces; less if the file was truncated, which the receiver finds."""
    part.file.seek(0)
    left = part.size_bytes
    while left:
        if is_abandoned():
            raise Abandoned
        data = part.file.read(min(transfer.CHUNK_BYTES, left))
        if not data:
            return
        left -= len(data)
        yield data


def _whole_lines(file: BinaryIO) -> int:
    """Return the size of a file without a last line that is being written."""
    size = os.fstat(file.fileno()).st_size
    end = size
    while end:
        first = max(0, end - transfer.CHUNK_BYTES)
        file.seek(first)
        at = file.read(end - first).rfind(b"\n")
        if at >= 0:
            return first + at + 1
        end = first
    return 0


def _interrupted_state(run_dir: Path, checkpoint: Checkpoint) -> bytes:
    """Return the content of `state.json` of a run that was interrupted after a checkpoint.

    On another host, a run whose state has no end counts as running.
    """
    state = run_state.read(run_dir)
    if state is None:
        raise FileNotFoundError(f"{run_dir} has no readable {layout.STATE}")
    ended = dataclasses.replace(
        state,
        state=run_state.INTERRUPTED,
        exit_code=INTERRUPTED,
        update=checkpoint.update,
        status_port=None,
        status_token_file=None,
        submission_id=None,
        message="a copy of --checkpoint-copies",
    )
    return (strict_json(dataclasses.asdict(ended)) + "\n").encode()
