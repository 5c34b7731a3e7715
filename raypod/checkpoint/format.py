"""The manifest of a checkpoint: where it was taken, what must be the same to go on exactly, and what its files hold.

Plain JSON; reading it needs no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from raypod.errors import CheckpointDamaged
from raypod.host.files import replace_file
from raypod.plan.resolve import MANIFEST

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """What a file of the checkpoint must be."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its tensors."""

    update: int  # updates done
    epoch: int  # 0-based, of the next update
    position: int  # of the next update's first sample in that epoch's order
    generation: int  # lives of the fleet, over all resumes; with `update`, the order of a run's checkpoints
    settings: Dict[str, Any]  # what must be the same, by "section.key" and a few numbers that follow from them
    geometry: Dict[str, int]
    versions: Dict[str, str]
    weights_sha256: str = ""
    test_accuracy: Optional[float] = None  # percent, where the test split was evaluated at this update
    files: Dict[str, FileRecord] = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        """What `manifest_from_json` reads."""
        return (json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n").encode()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    manifest: Manifest

    @property
    def update(self) -> int:
        """Updates done."""
        return self.manifest.update


def manifest_from_json(text: bytes) -> Manifest:
    """Read a manifest. ValueError or TypeError for anything else."""
    content = json.loads(text.decode())
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"it is no manifest of format {_FORMAT}")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)


# --- from checkpoint.folder: The folder `checkpoints/`: names, what lies in it, and whether a checkpoint is what it was written as. No torch.

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
        return Checkpoint(path, manifest_from_json(text))
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


# --- from checkpoint.retention: Which checkpoints are kept: the last few, and the one with the best test accuracy.


def superfluous(newest_first: Sequence[Checkpoint], keep: int) -> List[Checkpoint]:
    """Those of a run's checkpoints that need not be kept, the oldest first."""
    tested = [each for each in newest_first if each.manifest.test_accuracy is not None]
    best = max(tested, key=lambda each: each.manifest.test_accuracy or 0.0, default=None)  # the newest of equals
    return [each for each in reversed(newest_first[keep:]) if each is not best]
