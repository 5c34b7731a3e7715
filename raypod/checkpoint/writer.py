"""Writes a checkpoint so that it is whole or absent, and never at the cost of the one before it.

The order is the safety: all files in a folder of another name, each flushed to the disk; the manifest that describes
them; the rename, with which the checkpoint exists; the pointer `LATEST`; only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from raypod.checkpoint import format, tensors
from raypod.checkpoint.format import Checkpoint, FileRecord, Manifest, superfluous
from raypod.checkpoint.tensors import copied
from raypod.errors import WaitTimedOut
from raypod.events import SaveReport
from raypod.host import files
from raypod.plan.plan import Plan
from raypod.plan.resolve import MANIFEST


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint keeps of a training: tensors that nobody changes any more, on the CPU."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Any  # a nest, see tensors.pack_nested
    replicas: Any = None  # per-replica statistics and random states, where the SDK lets them be read


def write_checkpoint(checkpoints: Path, manifest: Manifest, state: State, keep: int) -> Checkpoint:
    """Write a checkpoint and remove those that need not be kept.

    Raises:
        OSError: the disk's own, as at a full one. What was written of the checkpoint is gone again.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    _clear(checkpoints)
    target = checkpoints / format.name_of(manifest.update)
    partial = target.with_name(target.name + format.PARTIAL)
    try:
        partial.mkdir()
        manifest = _write_files(partial, manifest, state)
        if target.exists():  # a run that went back to an older checkpoint comes by here again
            files.remove_folder(target)
        files.rename_folder(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            _clear(checkpoints)
        raise
    files.replace_file(checkpoints / format.LATEST, f"{target.name}\n".encode())
    readable, _ = format.found_in(checkpoints)
    for old in superfluous(readable, keep):
        files.remove_folder(old.path)
    return Checkpoint(target, manifest)


def load_checkpoint(path: Path) -> Dict[str, Any]:
    """The state of a checkpoint: `weights`, `optimizer`, and `replicas` (None where it has none).

    Raises:
        CheckpointDamaged: a file is not what was written.
    """
    replicas = path / format.REPLICAS
    return {
        "weights": tensors.read_tensors(path / format.WEIGHTS)[0],
        "optimizer": tensors.unpack_nested(path / format.OPTIMIZER),
        "replicas": tensors.unpack_nested(replicas) if replicas.exists() else None,
    }


def _write_files(partial: Path, manifest: Manifest, state: State) -> Manifest:
    contents: Dict[str, Tuple[Mapping[str, torch.Tensor], Mapping[str, str]]] = {
        format.WEIGHTS: (state.weights, {}),
        format.OPTIMIZER: tensors.pack_nested(state.optimizer),
    }
    if state.replicas is not None:
        contents[format.REPLICAS] = tensors.pack_nested(state.replicas)
    records = {}
    for name, (named, metadata) in contents.items():
        with files.new_file(partial / name) as file:
            tensors.write_tensors(file, named, metadata)
        records[name] = FileRecord(file.size_bytes, file.sha256)
    manifest = dataclasses.replace(manifest, files=records, weights_sha256=tensors.weights_sha256(state.weights))
    text = manifest.to_json()
    for name, content in ((MANIFEST, text), (format.MANIFEST_SHA256, format.manifest_sha256(text))):
        with files.new_file(partial / name) as file:
            file.write(content)
    return manifest


def _clear(checkpoints: Path) -> None:
    """Remove what a write_checkpoint that was cut off has left."""
    for left in checkpoints.iterdir():
        if left.suffix in (format.PARTIAL, format.REMOVED):
            if left.is_dir():
                shutil.rmtree(str(left), ignore_errors=True)
            else:
                left.unlink()


# --- from checkpoint.background: Writes checkpoints beside the training: a copy is taken between two calls, and a thread writes it. One at a time.


class BackgroundWriter:
    """The checkpoints of one run folder, written by instance 0."""

    def __init__(self, plan: Plan) -> None:
        self._checkpoints = format.folder_of(plan.run_dir)
        run = plan.config.run
        self._keep, self._timeout_s = run.keep_checkpoints, run.save_timeout_s
        self._grace_s = run.stop_timeout_s
        # From weights that are no numbers any more nobody can go on; the checkpoint before them is worth more.
        self._only_finite = run.on_nonfinite == "stop"
        self._thread: Optional[threading.Thread] = None
        self._done: List[SaveReport] = []

    def begin(self, manifest: Manifest, state: State) -> None:
        """Copy the state and write the copy, after the write under way if there is one.

        Raises:
            WaitTimedOut: that one does not end.
        """
        copy = State(copied(state.weights), copied(state.optimizer), copied(state.replicas))
        self._join()
        # A daemon: the second Ctrl-C does not wait for a disk, and what it cuts off is no checkpoint.
        self._thread = threading.Thread(target=self._write, args=(manifest, copy), name="checkpoint", daemon=True)
        self._thread.start()

    def taken(self) -> Tuple[SaveReport, ...]:
        """What has become of checkpoints since the last look."""
        done: List[SaveReport] = []
        while self._done:
            done.append(self._done.pop(0))
        return tuple(done)

    def finish(self) -> Tuple[SaveReport, ...]:
        """Wait for the write under way; as `taken`. WaitTimedOut if it does not end."""
        self._join()
        return self.taken()

    def close(self) -> None:
        """Give the write under way a moment to end: if it does not, it is no checkpoint."""
        if self._thread is not None:
            self._thread.join(self._grace_s)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._timeout_s)
            if self._thread.is_alive():
                raise WaitTimedOut(f"a checkpoint to be written in {self._checkpoints}", self._timeout_s, _SETTING)
            self._thread = None

    def _write(self, manifest: Manifest, state: State) -> None:
        path = str(self._checkpoints / format.name_of(manifest.update))
        try:
            turned = _not_finite(state) if self._only_finite else None
            if turned is not None:
                self._done.append(SaveReport(manifest.update, path, "", f"{turned} is not finite"))
                return
            written = write_checkpoint(self._checkpoints, manifest, state, self._keep)
            self._done.append(SaveReport(manifest.update, str(written.path), written.manifest.weights_sha256, None))
        except Exception as error:  # noqa: BLE001 - the thread's border: whatever it is, the run hears of it
            told = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._done.append(SaveReport(manifest.update, path, "", told))


_SETTING = "run.save_timeout_s"


def _not_finite(state: State) -> Optional[str]:
    for name, tensor in state.weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None
