"""Pack an image folder, or the samples of map-style data sets, into shards: see `shards` for the format.

The shards and their index are written to a temporary folder next to the target, which is renamed at the end.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import xxhash
from typing_extensions import Protocol

from raypod.errors import ConfigError, WaitTimedOut, summarize_exception
from raypod.plan.user_code import place_of
from raypod.system.files import NewFile, file_lock, new_file, rename_folder, sync_folder
from raypod.training.data import image_folder, shards
from raypod.training.data.order import packed_order
from raypod.training.data.packed_samples import Form, encode, form_of
from raypod.training.data.shards import Index, Shard, SplitIndex

PARTIAL = ".partial"  # appended to the name of the target
_LOCK = "lock"
_LOCK_TIMEOUT_S = 2.0
_DRAWN = 16  # samples of a split, evenly spaced, that are loaded again to see whether they draw random numbers
Check = Callable[[Any, str], object]


class Packed(NamedTuple):
    """What was written: samples of each split, shards and their bytes; and lines about files that were skipped."""

    train: int
    test: int
    shards: int
    bytes: int
    skipped: List[str]


def pack(folder: Path, target: Path, shard_bytes: int, on_sample: Callable[[int, int], object]) -> Packed:
    """Pack the image folder `folder` into the new folder `target`.

    Args:
        shard_bytes: largest size of a shard, unless one sample is larger.
        on_sample: called with (samples written so far, all samples).

    Raises:
        ConfigError: `folder` is no image folder, `target` exists or cannot be written, or another process packs there.
    """
    if shards.is_packed(folder):
        raise ConfigError(f"{folder} is packed already")
    if not image_folder.has_classes(folder):
        raise ConfigError(
            f"{folder / 'train'} has no class folders; expected {folder}/train/CLASS/*.jpg, or train*.parquet, or "
            "train*.tar; a text is packed by --task language-model --text FILES"
        )
    check_target(target)
    files = image_folder.list_files(folder)
    images = {split: _Images(folder, files[f"{split}_files"], files[f"{split}_labels"]) for split in shards.SPLITS}
    described = {"classes": image_folder.class_names(files)}
    packed = _write(str(folder), images, described, target, shard_bytes, on_sample)
    return packed._replace(skipped=[os.fsdecode(line) for line in files["skipped"].tolist() if line])


def pack_samples(
    name: str,
    splits: Dict[str, SamplesOfSplit],
    classes: Tuple[str, ...],
    target: Path,
    shard_bytes: int,
    on_sample: Callable[[int, int], object],
) -> Packed:
    """Pack the samples of map-style data sets into the new folder `target`.

    Args:
        name: of the data, for messages.
        splits: `train` and `test`.
        classes: their names, of labelled images.
        shard_bytes, on_sample: see `pack`.

    Raises:
        ConfigError: a sample cannot be packed, or as `pack`.
    """
    check_target(target)
    form = splits["train"].form
    described = {"classes": classes, "structure": form.structure, "fields": form.fields}
    return _write(name, splits, described, target, shard_bytes, on_sample)


def check_target(target: Path) -> None:
    """Raise ConfigError if a folder to which data is packed exists."""
    if target.exists():
        raise ConfigError(f"{target} exists; choose another folder, or remove it")


def _write(
    name: str,
    contents: Mapping[str, _Content],
    described: Dict[str, Any],
    target: Path,
    shard_bytes: int,
    on_sample: Callable[[int, int], object],
) -> Packed:
    """Write the shards of both splits, and the index with what is `described` of them."""
    total, written = sum(map(len, contents.values())), 0

    def count() -> None:
        nonlocal written
        written += 1
        on_sample(written, total)

    with packed_folder(name, target) as partial:
        packed = {split: _Split(content, partial, split) for split, content in contents.items()}
        splits = {
            split: SplitIndex(samples=len(contents[split]), shards=tuple(packed[split].write(shard_bytes, count)))
            for split in shards.SPLITS
        }
        checksums = write_arrays(partial, {split: content.arrays for split, content in packed.items()})
        return write_index(partial, {**splits, **described, "arrays": checksums})


@contextlib.contextmanager
def packed_folder(name: str, target: Path) -> Iterator[Path]:
    """Yield an empty folder next to the new folder `target`, which it becomes at the end of the block.

    Raises:
        ConfigError: `target` exists or cannot be written, or another process packs there.
    """
    check_target(target)
    partial = target.with_name(target.name + PARTIAL)
    try:
        with _locked(partial):
            yield partial
            (partial / _LOCK).unlink()
            rename_folder(partial, target)
    except OSError as error:
        raise ConfigError(f"cannot pack {name} into {target}: {_reason(error)}") from None


def write_index(folder: Path, fields: Mapping[str, Any], skipped: Sequence[str] = ()) -> Packed:
    """Write the index of a packed folder, with these fields of `Index`. OSError as from the file system."""
    index = Index(format=shards.FORMAT, version=shards.VERSION, **fields)
    with new_file(folder / shards.INDEX) as file:
        file.write(index.model_dump_json(indent=1).encode())
    return Packed(index.train.samples, index.test.samples, len(index.shards), shards.bytes_of(index), list(skipped))


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


class _Content(Protocol):
    """What is packed of a split.

    Attributes:
        columns: arrays of the index besides the places in the shards.
    """

    columns: Dict[str, np.ndarray]

    def __len__(self) -> int:
        """Return the number of samples."""

    def files(self, sample: int) -> Tuple[List[Tuple[str, bytes]], List[Tuple[str, bytes]]]:
        """Return the files of a sample, and files that are not read from the shards: suffix and content of each."""


class _Images:
    """The images of a split; implements `_Content`."""

    def __init__(self, folder: Path, files: np.ndarray, labels: np.ndarray) -> None:
        self._folder, self.columns = folder, {"files": files, "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def files(self, sample: int) -> Tuple[List[Tuple[str, bytes]], List[Tuple[str, bytes]]]:
        """See `_Content.files`: the image, and its label. OSError if the image is empty."""
        file = os.fsdecode(bytes(self.columns["files"][sample]))
        data = (self._folder / file).read_bytes()
        if not data:
            raise OSError(f"{self._folder / file} is empty; replace it, or remove it")
        suffix = Path(file).suffix.lower().replace(".jpeg", ".jpg")
        return [(suffix, data)], [(".cls", str(int(self.columns["labels"][sample])).encode())]


class SamplesOfSplit:
    """The samples of a map-style data set; implements `_Content`.

    They are loaded as an evaluation loads them.

    Args:
        data: the data set.
        name: of the split, for messages.
        form: of the samples; default: that of the first one.
        check: called with each sample and its name; it raises ConfigError for one that cannot be used.

    Raises:
        ConfigError: the first sample cannot be packed.
    """

    def __init__(self, data: Any, name: str, form: Optional[Form] = None, check: Optional[Check] = None) -> None:
        from raypod.training.data.loading import NO_EPOCH, SeededSamples  # imports torch

        self._samples, self._number, self._name = SeededSamples(data, 0), len(data), name
        self._evaluation, self._check = NO_EPOCH, check
        self.columns: Dict[str, np.ndarray] = {}
        if form is None:
            with self._named(0):
                form = form_of(self._load(0))
        self.form: Form = form
        for sample in range(0, self._number, -(-self._number // _DRAWN) or 1):
            self._check_draws(sample)

    def __len__(self) -> int:
        return self._number

    def files(self, sample: int) -> Tuple[List[Tuple[str, bytes]], List[Tuple[str, bytes]]]:
        """See `_Content.files`. ConfigError if the sample cannot be packed."""
        with self._named(sample):
            return encode(self._load(sample), self.form), []

    def _check_draws(self, sample: int) -> None:
        """Raise ConfigError if a sample differs from epoch to epoch."""
        with self._named(sample):
            found = encode(self._load(sample), self.form)
            if any(encode(self._load(sample, epoch), self.form) != found for epoch in (0, 1)):
                raise ConfigError(
                    "it draws random numbers, which would be the same in every epoch: pack the data set without its "
                    "augmentation, and augment in the task's `collate`"
                )

    def _load(self, sample: int, epoch: Optional[int] = None) -> Any:
        found = self._samples[self._evaluation if epoch is None else epoch, sample][1]
        if self._check is not None:
            self._check(found, f"{self._name} sample {sample}")
        return found

    @contextlib.contextmanager
    def _named(self, sample: int) -> Iterator[None]:
        """Name the sample in errors."""
        name = f"{self._name} sample {sample}"
        try:
            yield
        except ConfigError as error:
            raise ConfigError(str(error) if name in str(error) else f"{name}: {error}") from None
        except Exception as error:
            raise ConfigError(f"{name}: {summarize_exception(error)}{place_of(error)}") from error


def splits_of(train: Any, test: Any, check: Optional[Check] = None) -> Dict[str, SamplesOfSplit]:
    """Return two map-style data sets as `pack_samples` takes them; `check` is that of `SamplesOfSplit`."""
    packed = SamplesOfSplit(train, "training", None, check)
    return {"train": packed, "test": SamplesOfSplit(test, "test", packed.form, check)}


class _Split:
    """A split that is being packed, with the arrays of its index."""

    def __init__(self, content: _Content, target: Path, split: str) -> None:
        self._content, self._target, self._name = content, target, shards.SPLITS[split]
        self._is_shuffled, self._count = split == "train", len(content)
        self.arrays: Dict[str, np.ndarray] = {
            **content.columns,
            "shards": np.zeros(self._count, dtype=np.int32),
            "offsets": np.zeros(self._count, dtype=np.int64),
            "sizes": np.zeros(self._count, dtype=np.int64),
            "checksums": np.zeros(self._count, dtype=np.uint64),
        }

    def write(self, shard_bytes: int, on_sample: Callable[[], None]) -> List[Shard]:
        """Write all shards and return them."""
        count = self._count
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
        files, others = self._content.files(sample)
        if tar.size and tar.size_with(*(len(data) for _, data in (*files, *others))) > shard_bytes:
            return False
        key = f"{sample:09d}"
        offset, stored = tar.add([(f"{key}{suffix}", data) for suffix, data in files])
        arrays["shards"][sample], arrays["offsets"][sample], arrays["sizes"][sample] = shard, offset, len(stored)
        arrays["checksums"][sample] = shards.checksum_of_sample(stored)
        if others:
            tar.add([(f"{key}{suffix}", data) for suffix, data in others])
        return True


class _Tar:
    """A tar file that is being written, with its size and its checksum. The same members make the same bytes."""

    def __init__(self, output: NewFile) -> None:
        self._output, self._digest = output, xxhash.xxh3_128()
        self.size = 0

    @property
    def checksum(self) -> str:
        """XXH3-128 of all bytes so far."""
        return self._digest.hexdigest()

    def add(self, files: List[Tuple[str, bytes]]) -> Tuple[int, bytes]:
        """Append files; return where the content of the first begins, and all from there to the end of the last."""
        added, begins, padding = bytearray(), self.size + tarfile.BLOCKSIZE, 0
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            padding = _padded(len(data)) - len(data)
            added += member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(padding)
        self._append(bytes(added))
        return begins, bytes(added[tarfile.BLOCKSIZE : len(added) - padding])

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


def write_arrays(target: Path, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Dict[str, str]:
    """Write the arrays of the index, by split and column, and return their checksums by name."""
    folder, checksums = target / shards.ARRAYS, {}
    folder.mkdir()
    for split, columns in arrays.items():
        for column, array in columns.items():
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
