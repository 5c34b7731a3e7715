"""Writes a checkpoint so that it is whole or absent, and never at the cost of the one before it.

The order is the safety: all files in a folder of another name, each flushed to the disk; the manifest that describes
them; the rename, with which the checkpoint exists; the pointer `LATEST`; only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any, Dict, Mapping, Tuple

import torch

from raypod.checkpoint import folder, tensors
from raypod.checkpoint.manifest import MANIFEST, Checkpoint, FileRecord, Manifest
from raypod.checkpoint.retention import superfluous
from raypod.record import durable
from raypod.state import weights


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint keeps of a training: tensors that nobody changes any more, on the CPU."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Any  # a nest, see tensors.pack
    replicas: Any = None  # per-replica statistics and random states, where the SDK lets them be read


def write(checkpoints: Path, manifest: Manifest, state: State, keep: int) -> Checkpoint:
    """Write a checkpoint and remove those that need not be kept.

    Raises:
        OSError: the disk's own, as at a full one. What was written of the checkpoint is gone again.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    _clear(checkpoints)
    target = checkpoints / folder.name_of(manifest.update)
    partial = target.with_name(target.name + folder.PARTIAL)
    try:
        partial.mkdir()
        manifest = _write_files(partial, manifest, state)
        if target.exists():  # a run that went back to an older checkpoint comes by here again
            durable.remove_folder(target)
        durable.rename_folder(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            _clear(checkpoints)
        raise
    durable.replace_file(checkpoints / folder.LATEST, f"{target.name}\n".encode())
    readable, _ = folder.found_in(checkpoints)
    for old in superfluous(readable, keep):
        durable.remove_folder(old.path)
    return Checkpoint(target, manifest)


def load(path: Path) -> Dict[str, Any]:
    """The state of a checkpoint: `weights`, `optimizer`, and `replicas` (None where it has none).

    Raises:
        CheckpointDamaged: a file is not what was written.
    """
    replicas = path / folder.REPLICAS
    return {
        "weights": tensors.read(path / folder.WEIGHTS)[0],
        "optimizer": tensors.unpack(path / folder.OPTIMIZER),
        "replicas": tensors.unpack(replicas) if replicas.exists() else None,
    }


def _write_files(partial: Path, manifest: Manifest, state: State) -> Manifest:
    contents: Dict[str, Tuple[Mapping[str, torch.Tensor], Mapping[str, str]]] = {
        folder.WEIGHTS: (state.weights, {}),
        folder.OPTIMIZER: tensors.pack(state.optimizer),
    }
    if state.replicas is not None:
        contents[folder.REPLICAS] = tensors.pack(state.replicas)
    files = {}
    for name, (named, metadata) in contents.items():
        with durable.new_file(partial / name) as file:
            tensors.write(file, named, metadata)
        files[name] = FileRecord(file.size_bytes, file.sha256)
    manifest = dataclasses.replace(manifest, files=files, weights_sha256=weights.weights_sha256(state.weights))
    text = manifest.to_json()
    for name, content in ((MANIFEST, text), (folder.MANIFEST_SHA256, folder.manifest_sha256(text))):
        with durable.new_file(partial / name) as file:
            file.write(content)
    return manifest


def _clear(checkpoints: Path) -> None:
    """Remove what a write that was cut off has left."""
    for left in checkpoints.iterdir():
        if left.suffix in (folder.PARTIAL, folder.REMOVED):
            if left.is_dir():
                shutil.rmtree(str(left), ignore_errors=True)
            else:
                left.unlink()
