"""The manifest of a checkpoint: where it was taken, what must be the same to go on exactly, and what its files hold.

Plain JSON; reading it needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, Optional

MANIFEST = "manifest.json"
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
        """What `from_json` reads."""
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


def run_folder_of(resume: str) -> Optional[Path]:
    """The run folder that `--resume` names, itself or by one of its checkpoints; None for a checkpoint elsewhere."""
    path = Path(resume).resolve()
    if not (path / MANIFEST).exists():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else None


def from_json(text: bytes) -> Manifest:
    """Read a manifest. ValueError or TypeError for anything else."""
    content = json.loads(text.decode())
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"it is no manifest of format {_FORMAT}")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)
