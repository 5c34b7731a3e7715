"""The format of a checkpoint on disk: its manifest, the layout of the folder `checkpoints/`, and which ones are kept.

Does not import torch. The tensor files are read and written by `tensors`.
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
from raypod.plan.config import MANIFEST

MANIFEST_SHA256, LATEST = "manifest.sha256", "LATEST"
WEIGHTS, OPTIMIZER, REPLICAS = "weights.safetensors", "optimizer.safetensors", "replicas.safetensors"
PARTIAL, REMOVED = ".partial", ".removed"
_FORMAT = 1
_NAME = re.compile(r"update-(\d+)$")
_CHUNK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The expected size and hash of one file of a checkpoint."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that a checkpoint records except its tensors."""

    update: int  # updates done
    epoch: int  # 0-based, of the next update
    position: int  # of the next update's first sample in that epoch's order
    generation: int  # counts fleet starts over all resumes; with `update`, it orders a run's checkpoints
    settings: Dict[str, Any]  # what resuming compares: "section.key", and values derived from the configuration
    geometry: Dict[str, int]
    versions: Dict[str, str]
    weights_sha256: str = ""
    test_accuracy: Optional[float] = None  # percent; None if the test split was not evaluated at this update
    files: Dict[str, FileRecord] = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the JSON that `manifest_from_json` parses."""
        return (json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n").encode()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    manifest: Manifest

    @property
    def update(self) -> int:
        """The number of updates done."""
        return self.manifest.update


def manifest_from_json(text: bytes) -> Manifest:
    """Parse a manifest. ValueError, TypeError, KeyError or AttributeError for any other content."""
    content = json.loads(text.decode())
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"it is not a manifest of format {_FORMAT}")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)


def checkpoints_folder(run_dir: Union[str, Path]) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(run_dir) / "checkpoints"


def checkpoint_name(update: int) -> str:
    """Return the folder name of the checkpoint after `update` updates."""
    return f"update-{update:08d}"


def read_manifest(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check its hash. The tensor files are not read.

    Raises:
        CheckpointDamaged: the manifest is missing or was changed.
    """
    try:
        text = (path / MANIFEST).read_bytes()
        hashes = (path / MANIFEST_SHA256).read_text().split()[::2]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(str(path), f"its manifest cannot be read ({error})") from None
    if hashlib.sha256(text).hexdigest() not in hashes:
        raise CheckpointDamaged(str(path), f"the SHA-256 of {MANIFEST} does not match {MANIFEST_SHA256}")
    try:
        return Checkpoint(path, manifest_from_json(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(str(path), f"{MANIFEST} cannot be parsed ({error})") from None


def manifest_sha256(text: bytes) -> bytes:
    """Return the line of `manifest.sha256` for a manifest, in the format of `sha256sum`."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def replace_manifest(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Replace the manifest of a checkpoint. It stays readable if the process is killed at any point.

    Raises:
        OSError: the file system's own, for example on a full disk.
    """
    old, new = checkpoint.manifest.to_json(), manifest.to_json()
    # Both hashes are valid while the manifest itself is replaced.
    replace_file(checkpoint.path / MANIFEST_SHA256, manifest_sha256(old) + manifest_sha256(new))
    replace_file(checkpoint.path / MANIFEST, new)
    replace_file(checkpoint.path / MANIFEST_SHA256, manifest_sha256(new))


def verify(checkpoint: Checkpoint) -> None:
    """Check the size and hash of every file. CheckpointDamaged names the first one that does not match."""
    for name, record in checkpoint.manifest.files.items():
        file = checkpoint.path / name
        if Path(name).name != name or not file.is_file():
            raise CheckpointDamaged(str(checkpoint.path), f"{name} is missing")
        size = file.stat().st_size
        if size != record.size_bytes:
            raise CheckpointDamaged(str(checkpoint.path), f"{name} has {size} bytes, expected {record.size_bytes}")
        if _sha256_of(file) != record.sha256:
            raise CheckpointDamaged(str(checkpoint.path), f"the SHA-256 of {name} does not match {MANIFEST}")


def list_checkpoints(folder: Path) -> Tuple[List[Checkpoint], List[CheckpointDamaged]]:
    """Return the checkpoints of a folder, newest first, and an error for each whose manifest cannot be read."""
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


def checkpoints_to_remove(newest_first: Sequence[Checkpoint], keep: int) -> List[Checkpoint]:
    """Return all but the newest `keep` checkpoints and the one with the best test accuracy, oldest first."""
    tested = [each for each in newest_first if each.manifest.test_accuracy is not None]
    best = max(tested, key=lambda each: each.manifest.test_accuracy or 0.0, default=None)  # the newest of equals
    return [each for each in reversed(newest_first[keep:]) if each is not best]


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
