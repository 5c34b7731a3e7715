"""The content of a checkpoint: its manifest as a record and as JSON, its tensor files, and which checkpoints are kept.

Does not import torch and writes no files: `storage` does, and `tensors` encodes the tensor files.

The hashes of the files are SHA-256 of small files, XXH3-128 of large ones. With SHA-256 hashing takes six times as long
as loading, with XXH3-128 less than loading. Both find every damage that a disk or a network causes. A manifest has the
SHA-256 of the weights, too, whatever the size of their file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import xxhash
from typing_extensions import Protocol

from raypod.plan.metric import LOSS, EpochSums, Metric
from raypod.system.files import parse_json

SHA256, XXH3_128 = "sha256", "xxh3_128"  # the keys of a file's record in the manifest
TITLES = {SHA256: "SHA-256", XXH3_128: "XXH3-128"}
LARGE_BYTES = 16 << 20  # SHA-256 of a smaller file takes at most 12 ms
_CHUNK_BYTES = 256 << 10  # fits into the cache of a core: the hash does not read the chunk from memory


class Digest(Protocol):
    """A hash that is being computed."""

    def update(self, data: Union[bytes, memoryview]) -> None:
        """Append bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


def algorithm_for(size_bytes: int) -> str:
    """Return the algorithm for a new file."""
    return XXH3_128 if size_bytes >= LARGE_BYTES else SHA256


def new_digest(algorithm: str) -> Digest:
    """Return an empty hash."""
    return hashlib.sha256() if algorithm == SHA256 else xxhash.xxh3_128()


def digest_of(buffers: Iterable[Union[bytes, memoryview]], algorithm: str) -> str:
    """Return the hash of buffers, uint8 [bytes] each, as hexadecimal digits."""
    digest = new_digest(algorithm)
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def digest_of_file(path: Path, algorithm: str) -> str:
    """Return the hash of a file. OSError as from the file system.

    The file is read, not mapped: a failing disk is an error then, and not a signal that ends the process.
    """
    digest, chunk = new_digest(algorithm), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(chunk)
            if not count:
                return digest.hexdigest()
            digest.update(chunk[:count])


WEIGHTS, OPTIMIZER, REPLICAS = "weights.safetensors", "optimizer.safetensors", "replicas.safetensors"
EMA = "ema.safetensors"  # the averaged weights, with --ema
TENSOR_FILES = (WEIGHTS, OPTIMIZER, REPLICAS, EMA)
_FORMAT, _FORMAT_WITH_XXH3 = 1, 2  # raypod before XXH3-128 reads the first, and names the second in its error


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The expected size and hash of one file of a checkpoint: one of the two hashes. ValueError for none or both."""

    size_bytes: int
    sha256: Optional[str] = None
    xxh3_128: Optional[str] = None

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.xxh3_128 is None):
            raise ValueError(f"a file has one hash, {SHA256} or {XXH3_128}")

    @property
    def algorithm(self) -> str:
        """The algorithm of the hash, see `algorithm_for`."""
        return SHA256 if self.xxh3_128 is None else XXH3_128

    @property
    def digest(self) -> str:
        """The hash, as hexadecimal digits."""
        return self.sha256 or self.xxh3_128 or ""


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
    ema_sha256: Optional[str] = None  # of the averaged weights
    # Test metrics; empty: not evaluated at this update.
    tested: Dict[str, float] = dataclasses.field(default_factory=dict)
    files: Dict[str, FileRecord] = dataclasses.field(default_factory=dict)
    # The changes of the number of replicas until this update, oldest first: `update`, `replicas` and
    # `gradient_accumulation` of each `events.Resized`.
    resizes: Tuple[Dict[str, int], ...] = ()
    # Of the updates of `epoch` that are done, for its metrics; empty at its beginning, and in older checkpoints.
    epoch_sums: EpochSums = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the JSON that `manifest_from_json` parses."""
        has_xxh3 = any(record.algorithm == XXH3_128 for record in self.files.values())
        content = {"format": _FORMAT_WITH_XXH3 if has_xxh3 else _FORMAT, **dataclasses.asdict(self)}
        content["files"] = {
            name: {"size_bytes": each.size_bytes, each.algorithm: each.digest} for name, each in self.files.items()
        }
        return (json.dumps(content, indent=2) + "\n").encode()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in the storage."""

    path: Path
    manifest: Manifest

    @property
    def update(self) -> int:
        """The number of updates done."""
        return self.manifest.update

    @property
    def age(self) -> Tuple[int, int]:
        """Generation and update: they order the checkpoints of a run."""
        return self.manifest.generation, self.update


def manifest_from_json(text: bytes) -> Manifest:
    """Parse a manifest. ValueError, TypeError, KeyError or AttributeError for any other content."""
    content = parse_json(text.decode())
    if not isinstance(content, dict) or content.pop("format", None) not in (_FORMAT, _FORMAT_WITH_XXH3):
        raise ValueError(f"it is not a manifest of format {_FORMAT} or {_FORMAT_WITH_XXH3}")
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    accuracy = content.pop("test_accuracy", None)  # of manifests before tasks had their own metrics
    if accuracy is not None:
        content["tested"] = {"accuracy": accuracy}
    content["resizes"] = tuple(content.get("resizes", ()))
    return Manifest(files=files, **content)


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept: the `newest`, and the one with the best test result by `metric`."""

    newest: int
    metric: Metric = LOSS


def checkpoints_to_remove(newest_first: Sequence[Checkpoint], kept: Retention) -> List[Checkpoint]:
    """Return the checkpoints that are not kept, oldest first."""
    best = best_of(newest_first, kept.metric)
    return [each for each in reversed(newest_first[kept.newest :]) if each is not best]


def of_course(newest_first: Sequence[Checkpoint]) -> List[Checkpoint]:
    """Return the checkpoints whose updates lead to the newest one, newest first.

    A run that went back to an earlier checkpoint has left the later ones behind.
    """
    found: List[Checkpoint] = []
    for each in newest_first:
        if not found or each.update < found[-1].update:
            found.append(each)
    return found


def best_of(newest_first: Sequence[Checkpoint], metric: Metric) -> Optional[Checkpoint]:
    """Return the checkpoint with the best test result, the newest of equals; None if none was evaluated."""
    best: Optional[Checkpoint] = None
    for each in of_course(newest_first):
        value = each.manifest.tested.get(metric.name)
        if value is not None and (best is None or metric.is_better(value, best.manifest.tested[metric.name])):
            best = each
    return best
