"""Pack an image folder into shards: see `shards` for the format.

The shards and their index are written to a temporary folder next to the target, which is renamed at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import numpy as np

from raypod.datasets import image_folder, shards
from raypod.datasets.order import packed_order
from raypod.datasets.shards import Index, Shard, SplitIndex
from raypod.errors import ConfigError, WaitTimedOut
from raypod.host.files import NewFile, file_lock, new_file, rename_folder, sync_folder

PARTIAL = ".partial"  # appended to the name of the target
_LOCK = "lock"
_LOCK_TIMEOUT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Packed:
    """What was written: samples of each split, shards and their bytes; and lines about files that were skipped."""

    train: int
    test: int
    shards: int
    bytes: int
    skipped: List[str]


def pack(folder: Path, target: Path, shard_bytes: int, on_sample: Callable[[int, int], object]) -> Packed:
    """Pack the image folder `folder` into the new folder `target`.

    Args:
        shard_bytes: largest size of a shard, unless one image is larger.
        on_sample: called with (samples written so far, all samples).

    Raises:
        ConfigError: `folder` is no image folder, `target` exists or cannot be written, or another process packs there.
    """
    if shards.is_packed(folder):
        raise ConfigError(f"{folder} is packed already")
    if not image_folder.has_classes(folder):
        raise ConfigError(f"{folder / 'train'} has no class folders; expected {folder}/train/CLASS/*.jpg")
    if target.exists():
        raise ConfigError(f"{target} exists; choose another folder, or remove it")
    files = image_folder.list_files(folder)
    total, written = sum(len(files[f"{split}_files"]) for split in shards.SPLITS), 0

    def count() -> None:
        nonlocal written
        written += 1
        on_sample(written, total)

    partial = target.with_name(target.name + PARTIAL)
    try:
        with _locked(partial):
            packed = {
                split: _Split(folder, partial, split, files[f"{split}_files"], files[f"{split}_labels"])
                for split in shards.SPLITS
            }
            listed = {split: packed[split].write(shard_bytes, count) for split in shards.SPLITS}
            checksums = _write_arrays(partial, packed)
            index = Index(
                format=shards.FORMAT,
                version=shards.VERSION,
                classes=image_folder.class_names(files),
                train=SplitIndex(samples=len(files["train_files"]), shards=tuple(listed["train"])),
                test=SplitIndex(samples=len(files["test_files"]), shards=tuple(listed["test"])),
                arrays=checksums,
            )
            with new_file(partial / shards.INDEX) as file:
                file.write(index.model_dump_json(indent=1).encode())
            (partial / _LOCK).unlink()
            rename_folder(partial, target)
    except OSError as error:
        raise ConfigError(f"cannot pack {folder} into {target}: {_reason(error)}") from None
    size = sum(each.bytes for each in index.shards)
    skipped = [os.fsdecode(line) for line in files["skipped"].tolist() if line]
    return Packed(index.train.samples, index.test.samples, len(index.shards), size, skipped)


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Create an empty folder that no other process uses; remove it if the block fails."""
    partial.mkdir(exist_ok=True)
    try:
        with file_lock(partial / _LOCK, _LOCK_TIMEOUT_S, ""):
            for left in partial.iterdir():  # of a process that was killed
                if left.name != _LOCK:
                    shutil.rmtree(str(left)) if left.is_dir() else left.unlink()
            try:
                yield
            except BaseException:
                shutil.rmtree(str(partial), ignore_errors=True)
                raise
    except WaitTimedOut:
        raise ConfigError(f"another process is packing into {partial}; wait for it, or choose another folder") from None


class _Split:
    """A split that is being packed, with the arrays of its index."""

    def __init__(self, folder: Path, target: Path, split: str, files: np.ndarray, labels: np.ndarray) -> None:
        self._folder, self._target, self._name = folder, target, shards.SPLITS[split]
        self._is_shuffled = split == "train"
        count = len(labels)
        self.arrays: Dict[str, np.ndarray] = {
            "files": files,
            "labels": labels,
            "shards": np.zeros(count, dtype=np.int32),
            "offsets": np.zeros(count, dtype=np.int64),
            "sizes": np.zeros(count, dtype=np.int64),
            "checksums": np.zeros(count, dtype=np.uint64),
        }
        assert tuple(self.arrays) == shards.COLUMNS

    def write(self, shard_bytes: int, on_sample: Callable[[], None]) -> List[Shard]:
        """Write all shards and return them."""
        count = len(self.arrays["labels"])
        order = packed_order(count) if self._is_shuffled else np.arange(count)
        (self._target / self._name).mkdir()
        written: List[Shard] = []
        next_position = 0
        while next_position < count:
            file, first = f"{self._name}/{len(written):05d}.tar", next_position
            with new_file(self._target / file) as output:
                tar = _Tar(output)
                while next_position < count:
                    is_added = self._add(tar, len(written), int(order[next_position]), shard_bytes)
                    if not is_added:
                        break
                    next_position += 1
                    on_sample()
                tar.end()
            samples = next_position - first
            written.append(Shard(file=file, bytes=tar.size, xxh3_128=tar.checksum, samples=samples))
        sync_folder(self._target / self._name)
        return written

    def _add(self, tar: _Tar, shard: int, sample: int, shard_bytes: int) -> bool:
        """Add a sample to a shard, unless the shard is not empty and would become too large."""
        arrays = self.arrays
        file = os.fsdecode(bytes(arrays["files"][sample]))
        data = (self._folder / file).read_bytes()
        if not data:
            raise OSError(f"{self._folder / file} is empty; replace it, or remove it")
        label = str(int(arrays["labels"][sample])).encode()
        if tar.size and tar.size_with(len(data), len(label)) > shard_bytes:
            return False
        key = f"{sample:09d}"
        arrays["shards"][sample], arrays["sizes"][sample] = shard, len(data)
        suffix = Path(file).suffix.lower().replace(".jpeg", ".jpg")
        arrays["offsets"][sample] = tar.add(f"{key}{suffix}", data)
        arrays["checksums"][sample] = shards.checksum_of_sample(data)
        tar.add(f"{key}.cls", label)
        return True


class _Tar:
    """A tar file that is being written, with its size and its checksum. The same members make the same bytes."""

    def __init__(self, output: NewFile) -> None:
        self._output, self._digest = output, shards.new_checksum()
        self.size = 0

    @property
    def checksum(self) -> str:
        """XXH3-128 of all bytes so far."""
        return str(self._digest.hexdigest())

    def add(self, name: str, data: bytes) -> int:
        """Append a file, and return where its content begins."""
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        self._append(member.tobuf(tarfile.USTAR_FORMAT))
        begins = self.size
        self._append(data)
        self._append(bytes(_padded(len(data)) - len(data)))
        return begins

    def end(self) -> None:
        """Append the end of a tar file."""
        self._append(bytes(self.size_with() - self.size))

    def size_with(self, *sizes: int) -> int:
        """Return the size of the complete tar file if files are added."""
        end = self.size + sum(tarfile.BLOCKSIZE + _padded(size) for size in sizes) + 2 * tarfile.BLOCKSIZE
        return -(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE

    def _append(self, data: bytes) -> None:
        self._output.write(data)
        self._digest.update(data)
        self.size += len(data)


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _write_arrays(target: Path, packed: Dict[str, _Split]) -> Dict[str, str]:
    """Write the arrays of the index and return their checksums by name."""
    folder, checksums = target / shards.ARRAYS, {}
    folder.mkdir()
    for split, content in packed.items():
        for column, array in content.arrays.items():
            name, encoded = f"{split}_{column}", io.BytesIO()
            np.save(encoded, array)
            path = folder / f"{name}.npy"
            with new_file(path) as file:
                file.write(encoded.getvalue())
            checksums[name] = shards.checksum_of(path)
    sync_folder(folder)
    return checksums


def _reason(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.strerror and error.filename else str(error)
