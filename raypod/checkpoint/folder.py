"""The folder `checkpoints/`: names, what lies in it, and whether a checkpoint is what it was written as. No torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import List, Tuple, Union

from raypod.checkpoint.manifest import MANIFEST, Checkpoint, Manifest, from_json
from raypod.errors import CheckpointDamaged
from raypod.record.durable import replace_file

MANIFEST_SHA256, LATEST = "manifest.sha256", "LATEST"
WEIGHTS, OPTIMIZER, REPLICAS = "weights.safetensors", "optimizer.safetensors", "replicas.safetensors"
PARTIAL, REMOVED = ".partial", ".removed"
_NAME = re.compile(r"update-(\d+)$")
_CHUNK_BYTES = 4 << 20


def folder_of(run_dir: Union[str, Path]) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def name_of(update: int) -> str:
    """The name of the checkpoint after `update` updates."""
    return f"update-{update:08d}"


def read_manifest(path: Path) -> Checkpoint:
    """A checkpoint by its manifest alone. CheckpointDamaged if that is missing or not what was written."""
    try:
        text = (path / MANIFEST).read_bytes()
        told = (path / MANIFEST_SHA256).read_text().split()[::2]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(str(path), f"its manifest cannot be read ({error})") from None
    if hashlib.sha256(text).hexdigest() not in told:
        raise CheckpointDamaged(str(path), f"{MANIFEST} is not the one that was written (sha256)")
    try:
        return Checkpoint(path, from_json(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(str(path), f"{MANIFEST} cannot be read ({error})") from None


def manifest_sha256(text: bytes) -> bytes:
    """The line that tells the hash of a manifest."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def replace_manifest(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Give a checkpoint another manifest. Whatever cuts that off, it can be read: in between both hashes are told.

    OSError as the disk says it.
    """
    old, new = checkpoint.manifest.to_json(), manifest.to_json()
    replace_file(checkpoint.path / MANIFEST_SHA256, manifest_sha256(old) + manifest_sha256(new))
    replace_file(checkpoint.path / MANIFEST, new)
    replace_file(checkpoint.path / MANIFEST_SHA256, manifest_sha256(new))


def verify(checkpoint: Checkpoint) -> None:
    """Read every file and compare. CheckpointDamaged names the first that is not what was written."""
    for name, record in checkpoint.manifest.files.items():
        file = checkpoint.path / name
        if Path(name).name != name or not file.is_file():
            raise CheckpointDamaged(str(checkpoint.path), f"{name} is missing")
        size = file.stat().st_size
        if size != record.size_bytes:
            raise CheckpointDamaged(str(checkpoint.path), f"{name} has {size} bytes and had {record.size_bytes}")
        if _sha256_of(file) != record.sha256:
            raise CheckpointDamaged(str(checkpoint.path), f"{name} is not what was written (sha256)")


def found_in(folder: Path) -> Tuple[List[Checkpoint], List[CheckpointDamaged]]:
    """The checkpoints of a folder, newest first, and those whose manifest cannot be read."""
    readable: List[Checkpoint] = []
    damaged: List[CheckpointDamaged] = []
    for path in sorted(folder.glob("update-*"), reverse=True):
        if _NAME.match(path.name) and path.is_dir():
            try:
                readable.append(read_manifest(path))
            except CheckpointDamaged as error:
                damaged.append(error)
    readable.sort(key=lambda each: (each.manifest.generation, each.update), reverse=True)
    return readable, damaged


def _sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while True:
                chunk = stream.read(_CHUNK_BYTES)
                if not chunk:
                    return digest.hexdigest()
                digest.update(chunk)
    except OSError as error:
        raise CheckpointDamaged(str(file), error.strerror or str(error)) from None
