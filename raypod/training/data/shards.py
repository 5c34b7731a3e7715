"""Data packed into shards: WebDataset's tar files, and an index by which every sample can be read on its own.

    index.json          classes, fields, the shards with their sizes and checksums, and the checksums of the arrays
    index/NAME.npy      one row per sample of a split: shard, offset, size, checksum; of images also file name, label
    train/00000.tar     of images 000000042.jpg, 000000042.cls, ...: the sample with index 42, and its label; of other
                        samples 000000042.FIELD.npy for each of its fields (see `packed_samples`)
    val/00000.tar       likewise

Samples have the order, and images the file names, that they had where they come from: a run computes the same with
both. Within the training shards their order is random, for programs that read them one after the other.
"""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pydantic
import xxhash
from typing_extensions import Annotated, Literal

from raypod.errors import ConfigError, as_utf8
from raypod.system.files import parse_json
from raypod.training.data.arrays import load_mapped
from raypod.training.data.order import packed_order

if TYPE_CHECKING:
    from raypod.plan.config import Config

INDEX, ARRAYS = "index.json", "index"
FORMAT, VERSION = "raypod-shards", 1
SPLITS = {"train": "train", "test": "val"}  # the folder of the shards of each split
PLACES = ("shards", "offsets", "sizes", "checksums")  # arrays of each split
COLUMNS = ("files", "labels", *PLACES)  # those of images
_MAX_OPEN = 64  # shards per process
_CHUNK_BYTES = 1 << 20
# Of a file that someone else may have written: neither leads out of a folder.
Checksum = Annotated[str, pydantic.Field(pattern="^[0-9a-f]{32}$")]
ShardPath = Annotated[str, pydantic.Field(pattern=r"^[a-z]+/[a-z0-9_]+\.(tar|npy|json)$")]


class Shard(pydantic.BaseModel, frozen=True):
    """A tar file: its path in the packed folder, its size, the XXH3-128 of its content, and its number of samples.

    The number is missing in what earlier versions of raypod have packed.
    """

    file: ShardPath
    bytes: int
    xxh3_128: Checksum
    samples: Optional[int] = None


class Field(pydantic.BaseModel, frozen=True):
    """An entry of every sample: its name, or its number in a tuple, and what it is as an object of Python.

    Files of tars of others have the names of their suffixes, and are also json, text or bytes.
    """

    name: str = pydantic.Field(pattern="^[A-Za-z0-9_.-]{1,64}$")
    kind: Literal["tensor", "array", "number", "json", "text", "bytes"]


class TextIndex(pydantic.BaseModel, frozen=True):
    """Of a text (see `packed_text`): the number of different tokens, the tokenizer, and the hash of both splits."""

    vocabulary: int
    tokenizer: Optional[Shard] = None
    sha256: str


class SplitIndex(pydantic.BaseModel, frozen=True):
    """The number of samples of a split, of a text that of its tokens, and its shards, of a text its arrays."""

    samples: int
    shards: Tuple[Shard, ...]


class Index(pydantic.BaseModel, frozen=True):
    """The content of index.json.

    Attributes:
        classes: their names, by label; empty for samples that are no labelled images.
        structure, fields: of a sample that is not a file of an image.
        text: what a text is besides its arrays; None for other data.
        train, test: the splits.
        arrays: XXH3-128 of each file in `index/`, by its name.
    """

    format: str
    version: int
    classes: Tuple[str, ...]
    structure: Optional[Literal["dict", "tuple", "single", "members"]] = None
    fields: Tuple[Field, ...] = ()
    text: Optional[TextIndex] = None
    train: SplitIndex
    test: SplitIndex
    arrays: Dict[str, Checksum]

    @property
    def shards(self) -> Tuple[Shard, ...]:
        """The shards of both splits, and the tokenizer of a text."""
        tokenizer = self.text and self.text.tokenizer
        return self.train.shards + self.test.shards + ((tokenizer,) if tokenizer else ())

    @property
    def columns(self) -> Tuple[str, ...]:
        """The names of the arrays of each split."""
        return COLUMNS if self.structure is None else PLACES


def is_packed(folder: Path) -> bool:
    """Whether a folder contains shards with an index."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> Index:
    """Return the index of a packed folder. ConfigError if it is damaged or has another version."""
    path = folder / INDEX
    try:
        return parse_index(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the index {path} ({error}); copy it again, or pack again") from None


def parse_index(text: bytes, path: str) -> Index:
    """Return the index of the content of the file at a path. ConfigError as `read_index`."""
    try:
        content = parse_json(text)
        form, version = content.get("format"), content.get("version")
        if form == FORMAT and version != VERSION:
            raise ConfigError(
                f"{path} has version {version}, and this version of raypod reads version {VERSION}: pack the data "
                "again with `raypod pack`, or install the version of raypod that has packed them"
            )
        if form != FORMAT:
            raise ConfigError(f"{path} is not the index of `raypod pack`: its format is {form!r}, not {FORMAT!r}")
        return Index.model_validate(content)
    except (ValueError, AttributeError) as error:
        reason = " ".join(str(error).split()[:20])
        raise ConfigError(f"cannot read the index {path} ({reason}); copy it again, or pack again") from None


def check_sizes(folder: Path, index: Index) -> None:
    """Raise ConfigError if a shard is missing or truncated."""
    for shard in index.shards:
        path = folder / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"the shard {path} cannot be read: {error.strerror}; copy it again") from None
        if size != shard.bytes:
            raise ConfigError(f"the shard {path} has {size} bytes, expected {shard.bytes}; copy it again")


def samples_of_shards(index: Index, arrays: Callable[[], Dict[str, np.ndarray]]) -> Tuple[int, ...]:
    """Return the number of samples in each training shard. `arrays` reads those of the index if they are needed."""
    known = tuple(shard.samples for shard in index.train.shards if shard.samples is not None)
    if len(known) == len(index.train.shards):
        return known
    return tuple(np.bincount(arrays()["train_shards"], minlength=len(index.train.shards)).tolist())


def check_order(place: object, index: Index, arrays: Dict[str, np.ndarray]) -> None:
    """Raise ConfigError if the training samples are not in their shards as `order.packed_order` has them."""
    counts = samples_of_shards(index, lambda: arrays)
    expected = np.repeat(np.arange(len(counts)), counts)
    if not np.array_equal(np.asarray(arrays["train_shards"])[packed_order(index.train.samples)], expected):
        raise ConfigError(
            f"{place}: another program than `raypod pack` has distributed its samples over the shards: omit "
            "--shuffle-window, or pack the data with `raypod pack`"
        )


def array_names(index: Index) -> List[str]:
    """Return the names of the arrays in `index/`; a text has none."""
    return [] if index.text else [f"{split}_{column}" for split in SPLITS for column in index.columns]


def read_arrays(folder: Path, index: Index) -> Dict[str, np.ndarray]:
    """Return the arrays by name, as train_labels, memory-mapped. ConfigError if one is missing or damaged."""
    arrays = {}
    for name in array_names(index):
        path = folder / ARRAYS / f"{name}.npy"
        try:
            found = checksum_of(path)
            if found != index.arrays.get(name):
                raise ValueError(f"its checksum is {found}, expected {index.arrays.get(name)}")
            arrays[name] = load_mapped(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"cannot read the index {path} ({reason}); copy it again, or pack again") from None
    return arrays


def verify(folder: Path, index: Index, on_bytes: Callable[[int], object]) -> None:
    """Compare every file with its checksum.

    Args:
        on_bytes: called with the size of each shard, after it was read.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    check_sizes(folder, index)
    read_arrays(folder, index)
    for shard in index.shards:
        try:
            found = checksum_of(folder / shard.file)
        except OSError as error:
            raise ConfigError(f"cannot read the shard {folder / shard.file}: {error.strerror}") from None
        if found != shard.xxh3_128:
            raise ConfigError(
                f"the shard {folder / shard.file} is damaged: its checksum is {found}, expected {shard.xxh3_128}; "
                "copy it again"
            )
        on_bytes(shard.bytes)


def checksum_of(path: Path) -> str:
    """Return the XXH3-128 of a file as hexadecimal digits. OSError as from the file system."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def checksum_of_sample(data: bytes) -> int:
    """Return the XXH3-64 of a sample's file as uint64."""
    return xxhash.xxh3_64_intdigest(data)


class PackedFolder:
    """A folder that `raypod pack` has written. ConfigError if its index is damaged, or a shard is missing.

    Attributes:
        index: the content of index.json.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.index = folder, read_index(folder)
        check_sizes(folder, self.index)

    def __str__(self) -> str:
        return str(self._folder)

    def arrays(self) -> Dict[str, np.ndarray]:
        """Return the arrays as `read_arrays`."""
        return read_arrays(self._folder, self.index)

    def file(self, shard: Shard) -> Path:
        """Return where a shard is on this host."""
        return self._folder / shard.file

    def files(self, split: str, arrays: Dict[str, np.ndarray]) -> PackedFiles:
        """Return the files of a split."""
        return PackedFiles(self._folder, *columns_of(self.index, split, arrays))

    def notes(self, config: Config) -> List[str]:
        """Return lines about the shards for the plan."""
        return window_notes(self.index, config.data.shuffle_window)


def columns_of(
    index: Index, split: str, arrays: Dict[str, np.ndarray]
) -> Tuple[Tuple[Shard, ...], Dict[str, np.ndarray]]:
    """Return the shards of a split, and its arrays by their names in `Index.columns`."""
    shards: Tuple[Shard, ...] = getattr(index, split).shards
    return shards, {name: arrays[f"{split}_{name}"] for name in index.columns}


def window_notes(index: Index, window: Optional[int]) -> List[str]:
    """Return a line about the window in which samples are shuffled, for the plan; none for no window."""
    shards = index.train.shards
    if window is None:
        return []
    if window >= len(shards):
        return [f"shuffled as a whole: the window is {window} shards, and there are {len(shards)}"]
    return [f"shuffled in windows of {window} of {len(shards)} shards, {shown_bytes(window_bytes(index, window))}"]


def window_bytes(index: Index, window: int) -> int:
    """Return the bytes of the largest window of training shards."""
    return sum(sorted((shard.bytes for shard in index.train.shards), reverse=True)[:window])


def bytes_of(index: Index) -> int:
    """Return the bytes of all shards."""
    return sum(shard.bytes for shard in index.shards)


def shown_bytes(number: int) -> str:
    """Return a number of bytes for people, as 1.25 GB."""
    return f"{number / 1e9:.2f} GB" if number >= 10**8 else f"{number / 1e6:.2f} MB"


class PackedFiles:
    """The files of a split in its shards; implements `Files`.

    Args:
        folder: the packed folder.
        shards: of the split.
        arrays: the columns of the split, by their names in `Index.columns`.
    """

    def __init__(self, folder: Path, shards: Tuple[Shard, ...], arrays: Dict[str, np.ndarray]) -> None:
        self._paths: List[str] = [str(folder / shard.file) for shard in shards]
        self._arrays = arrays
        self._open: collections.OrderedDict[int, int] = collections.OrderedDict()  # descriptors, oldest use first

    def __getstate__(self) -> Dict[str, Any]:
        """Return the state without the open files, which another process cannot use."""
        return {**self.__dict__, "_open": collections.OrderedDict()}

    def __del__(self) -> None:
        while self._open:
            self._close_oldest()

    def read(self, index: int) -> bytes:
        """Return the content of a file. OSError if the shard cannot be read, or its bytes have changed."""
        arrays = self._arrays
        size = int(arrays["sizes"][index])
        data = os.pread(self._descriptor(int(arrays["shards"][index])), size, int(arrays["offsets"][index]))
        if len(data) != size or checksum_of_sample(data) != int(arrays["checksums"][index]):
            raise OSError("its bytes in the shard have changed since it was packed")
        return data

    def size(self, index: int) -> int:
        """See `Files.size`; as it was packed."""
        return int(self._arrays["sizes"][index])

    def checksum(self, index: int) -> int:
        """See `Files.checksum`; as it was packed."""
        return int(self._arrays["checksums"][index])

    def name(self, index: int) -> str:
        """See `Files.name`."""
        return self._named(index, self._paths[int(self._arrays["shards"][index])])

    def _named(self, index: int, shard: str) -> str:
        """Return the name of a sample, and where its shard is."""
        if "files" not in self._arrays:
            return as_utf8(f"sample {index} ({shard})")
        return as_utf8(f"{os.fsdecode(bytes(self._arrays['files'][index]))} ({shard}, sample {index})")

    def _descriptor(self, shard: int) -> int:
        found = self._open.get(shard)
        if found is None:
            found = self._open[shard] = os.open(self._paths[shard], os.O_RDONLY)
            if len(self._open) > _MAX_OPEN:
                self._close_oldest()
        else:
            self._open.move_to_end(shard)
        return found

    def _close_oldest(self) -> None:
        with contextlib.suppress(OSError):  # opened only for reading: there is nothing to lose
            os.close(self._open.popitem(last=False)[1])
