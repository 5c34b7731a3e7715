"""Samples in shards that are no files of images: tensors, tuples and dicts, encoded as .npy files (see `shards`).

A sample is the part of a shard from the content of its first .npy file to the end of that of its last one. Each further
file follows after zeros up to a multiple of 512 bytes, and 512 bytes of a tar header. `raypod train` reads what
`raypod pack` has written as `--dataset shards`, and in place of the data sets of a task.
"""

from __future__ import annotations

import functools
import io
import math
import re
import sys
import tarfile
from tarfile import BLOCKSIZE
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
from numpy.lib import format as npy

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import LANGUAGE_MODEL, SHARDS, TEST_SAMPLE, Config
from raypod.plan.plan import DatasetSize
from raypod.system.files import looked_in, parse_json
from raypod.system.urls import is_url
from raypod.training.data import shards
from raypod.training.data.arrays import ImageShape, Splits, fingerprint_of_bytes
from raypod.training.data.cache import data_dir
from raypod.training.data.image_files import Files
from raypod.training.data.shard_stream import Packed, StreamedShards
from raypod.training.data.shards import Field

MEMBERS = "members"  # the structure of samples of tars of others, which are dicts of files (see `foreign_tars`)
# In a tar: the key of the sample, and the suffix.
FILE_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([A-Za-z0-9_.-]{1,64})$", re.DOTALL)
# As webdataset decodes files, by the last part of their suffixes; others are bytes.
_FILE_KINDS = {
    "npy": "array",
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "number"),
    **dict.fromkeys(("json", "jsn"), "json"),
    **dict.fromkeys(("txt", "text", "transcript"), "text"),
}
_FILE_DECODERS: Dict[str, Callable[[bytes], Any]] = {
    "array": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
    "number": int,
    "json": parse_json,
    "text": bytes.decode,
    "bytes": bytes,
}
_HEADERS = {1: (2, npy.read_array_header_1_0), 2: (4, npy.read_array_header_2_0)}  # by the version of a .npy file


class Form(NamedTuple):
    """How the samples of a data set look in Python: see `Index.structure` and `Index.fields`."""

    structure: str
    fields: Tuple[Field, ...]


def form_of(sample: Any) -> Form:
    """Return the form of a sample. ConfigError if it is none of tensors, arrays and numbers, or has an odd name."""
    structure, values = _entries(sample)
    fields = []
    for name, value in values.items():
        try:
            fields.append(Field(name=name if "." not in str(name) else "", kind=_kind_of(value)))
        except ValueError:
            raise ConfigError(
                f"the entry {name!r} cannot be packed: names have up to 64 letters, digits, hyphens and underscores"
            ) from None
        except TypeError as error:
            raise ConfigError(f"the entry {name!r} {error}") from None
    if not fields:
        raise ConfigError(f"a sample is an empty {type(sample).__name__}")
    return Form(structure, tuple(fields))


def encode(sample: Any, form: Form) -> List[Tuple[str, bytes]]:
    """Return the files of a sample, each with its name without the number of the sample, as in ".x.npy".

    Raises:
        ConfigError: the sample has another form.
    """
    found = form_of(sample)
    if found != form:
        raise ConfigError(f"it is {_shown(found)}, and the first one is {_shown(form)}")
    return [(f".{name}.npy", _encoded(name, value)) for name, value in _entries(sample)[1].items()]


def decode(data: bytes, form: Form) -> Any:
    """Return the sample that `encode` has encoded, from its part of a shard. ValueError if it is damaged."""
    if form.structure == MEMBERS:
        return _decoded_files(data, form.fields)
    values, position = [], 0
    for field in form.fields:
        array, end = _decoded(data, position)
        values.append(_as_kind(array, field.kind))
        position = -(-end // BLOCKSIZE) * BLOCKSIZE + BLOCKSIZE
    if form.structure == "dict":
        return {field.name: value for field, value in zip(form.fields, values)}
    return tuple(values) if form.structure == "tuple" else values[0]


def kind_of_file(suffix: str) -> str:
    """Return what a file of a sample in a tar of others is, by its suffix."""
    return _FILE_KINDS.get(suffix.rpartition(".")[2], "bytes")


def _decoded_files(data: bytes, fields: Tuple[Field, ...]) -> Dict[str, Any]:
    """Return the values of the files of a sample by suffix, from its part of a tar of others."""
    kinds, found = {field.name: field.kind for field in fields}, {}
    end = bytes(-len(data) % BLOCKSIZE + 2 * BLOCKSIZE)
    try:
        with tarfile.open(fileobj=io.BytesIO(data + end), mode="r:") as tar:
            for member in tar:
                name = FILE_NAME.match(member.name)
                suffix = name.group(2).lower() if name else ""
                content = tar.extractfile(member) if suffix in kinds else None
                if content is not None:
                    found[suffix] = _FILE_DECODERS[kinds[suffix]](content.read())
    except tarfile.TarError as error:
        raise ValueError(str(error)) from None
    return {name: found[name] for name in kinds}


def _entries(sample: Any) -> Tuple[str, Dict[str, Any]]:
    """Return the structure of a sample, and its entries by the names of their files."""
    if isinstance(sample, dict):
        return "dict", sample
    if isinstance(sample, (tuple, list)):
        return "tuple", {str(number): value for number, value in enumerate(sample)}
    return "single", {"0": sample}


def _kind_of(value: Any) -> str:
    """Return what a value is. TypeError if it cannot be packed."""
    if hasattr(value, "detach"):  # of torch, which may not be imported
        return "tensor"
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind in "biufc":
            return "array"
        raise TypeError(f"is an array of {value.dtype}: only numbers can be packed")
    if isinstance(value, (int, float)):
        return "number"
    raise TypeError(f"is a {type(value).__name__}: only tensors, arrays and numbers can be packed")


def _shown(form: Form) -> str:
    return f"a {form.structure} of " + ", ".join(f"{field.name} ({field.kind})" for field in form.fields)


def _encoded(name: str, value: Any) -> bytes:
    try:
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    except TypeError as error:  # of a dtype that NumPy does not have
        raise ConfigError(f"the entry {name!r} cannot be packed: {error}; convert it in the data set") from None
    file = io.BytesIO()
    npy.write_array(file, np.asarray(array, order="C"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _decoded(data: bytes, position: int) -> Tuple[np.ndarray, int]:
    """Return the array of the .npy file that begins at a position, and where it ends."""
    if data[position : position + 6] != npy.MAGIC_PREFIX:
        raise ValueError("no .npy file where one should begin")
    length = _HEADERS[data[position + 6]][0]
    begins = position + 8 + length
    begins += int.from_bytes(data[position + 8 : begins], "little")
    dtype, shape, order = _header(bytes(data[position:begins]))
    count = math.prod(shape)
    array = np.frombuffer(data, dtype, count, begins).reshape(shape, order=order).copy(order)
    return array, begins + count * dtype.itemsize


@functools.lru_cache(maxsize=1024)  # of samples of one shape, which is read a hundred times faster then
def _header(data: bytes) -> Tuple[np.dtype, Tuple[int, ...], Any]:
    file = io.BytesIO(data[8:])
    shape, is_fortran, dtype = _HEADERS[data[6]][1](file)
    return dtype, shape, "F" if is_fortran else "C"


def _as_kind(array: np.ndarray, kind: str) -> Any:
    if kind == "number":
        return array.item()
    if kind == "array":
        return array
    return sys.modules["torch"].from_numpy(array)  # imported by all who load samples of a task


class PackedSamples:
    """A map-style data set of the samples of a split.

    Args:
        files: the parts of the shards.
        form: of the samples.
        length: their number.
        fingerprint: of both splits.
        split: what is before the numbers of the samples in `--leave-out`.
    """

    draws_from_torch_only = True  # see `SeededSamples`: they draw nothing

    def __init__(self, files: Files, form: Form, length: int, fingerprint: str, split: str = "") -> None:
        self.files, self._form, self._length, self._split = files, form, length, split
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        """Return a sample as it was packed.

        Raises:
            OSError: it cannot be read; the message has its shard.
            ConfigError: its shard at a URL cannot be used.
        """
        if not 0 <= index < self._length:
            raise IndexError(index)
        try:
            return decode(self.files.read(index), self._form)
        except (OSError, ValueError) as error:
            raise OSError(
                f"cannot read {self.files.name(index)}: {error}; copy the shard again, or leave the sample out with "
                f"--leave-out {self._split}{index}"
            ) from error


def opened(config: Config) -> Packed:
    """Return what `raypod pack` has written at `data.data_dir`.

    Raises:
        DataMissing: there is nothing.
        ConfigError: it is damaged, or contains images.
    """
    if config.data.data_dir is not None and is_url(config.data.data_dir):
        packed: Packed = StreamedShards(config)
    else:
        folder = data_dir(config, "what `raypod pack` has written")
        if not shards.is_packed(folder):
            where = "" if folder.is_dir() else looked_in(folder)
            raise DataMissing(f"--data-dir {folder} has no {shards.INDEX}, which `raypod pack` writes{where}")
        packed = shards.PackedFolder(folder)
    check_no_text(packed)
    if packed.index.structure is None:
        raise ConfigError(f"{packed} has the images of a folder: train with --dataset imagefolder --data-dir {packed}")
    return packed


def check_no_text(packed: Packed) -> None:
    """Raise ConfigError for a text, which has no samples."""
    if packed.index.text is not None:
        raise ConfigError(f"{packed} has a text: train with --task {LANGUAGE_MODEL} --data-dir {packed}")


def splits_of(packed: Packed, config: Config) -> Tuple[PackedSamples, PackedSamples]:
    """Return the training and the test samples. ConfigError as `shards.read_arrays` and `shards.check_order`."""
    index, arrays = packed.index, packed.arrays()
    if config.data.shuffle_window is not None:
        shards.check_order(packed, index, arrays)
    form, contents = Form(str(index.structure), index.fields), [arrays[f"{split}_checksums"] for split in shards.SPLITS]
    fingerprint = fingerprint_of_bytes(*map(np.asarray, contents))
    train, test = (
        PackedSamples(packed.files(split, arrays), form, len(content), fingerprint, prefix)
        for (split, content), prefix in zip(zip(shards.SPLITS, contents), ("", TEST_SAMPLE))
    )
    return train, test


def size_of(packed: Packed, config: Config) -> DatasetSize:
    """Return the numbers of samples, without reading the shards."""
    index = packed.index
    counts = () if config.data.shuffle_window is None else shards.samples_of_shards(index, packed.arrays)
    return DatasetSize(index.train.samples, index.test.samples, notes=tuple(packed.notes(config)), shards=counts)


def size(config: Config) -> DatasetSize:
    """See `registry.dataset_size`."""
    return size_of(_images(config), config)


def shape(config: Config) -> ImageShape:
    """See `registry.image_shape`: that of the first training image."""
    packed = _images(config)
    train, _ = splits_of(packed, config)
    image = np.shape(train[0][0])
    if len(image) != 3:
        raise ConfigError(f"{packed}: images must be [channels, height, width], not {list(image)}")
    return ImageShape(image[0], image[1], len(packed.index.classes))


def load(config: Config) -> Splits:
    """See `registry.load`."""
    packed = _images(config)
    train, test = splits_of(packed, config)
    return Splits(train, test, len(packed.index.classes), train.fingerprint, names=packed.index.classes)


def _images(config: Config) -> Packed:
    """Return `opened`. ConfigError if it has no labelled images."""
    packed = opened(config)
    if not packed.index.classes:
        raise ConfigError(
            f"{packed} has no labelled images: --dataset {SHARDS} needs what `raypod pack --dataset module:function` "
            "writes; for other samples add --task module:Class, and omit --dataset"
        )
    return packed
