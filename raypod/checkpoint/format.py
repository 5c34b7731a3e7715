"""The content of a checkpoint: its manifest as a record and as JSON, its tensor files, and which checkpoints are kept.

Does not import torch and accesses no files: `storage` does, and `tensors` encodes the tensor files.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

WEIGHTS, OPTIMIZER, REPLICAS = "weights.safetensors", "optimizer.safetensors", "replicas.safetensors"
TENSOR_FILES = (WEIGHTS, OPTIMIZER, REPLICAS)
_FORMAT = 1


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
    """A checkpoint in the storage."""

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


def checkpoints_to_remove(newest_first: Sequence[Checkpoint], keep: int) -> List[Checkpoint]:
    """Return all but the newest `keep` checkpoints and the one with the best test accuracy, oldest first."""
    tested = [each for each in newest_first if each.manifest.test_accuracy is not None]
    best = max(tested, key=lambda each: each.manifest.test_accuracy or 0.0, default=None)  # the newest of equals
    return [each for each in reversed(newest_first[keep:]) if each is not best]
