"""WebDataset tars of others, indexed where they are: what `raypod pack` makes of them (see `shards`).

The shards of the packed folder are links to the tars. A tar holds the files of a sample one after the other, as
`KEY.jpg` and `KEY.cls`. With an image and its class they are samples like those of an image folder; otherwise a sample
is a dict of the values of its files by their suffixes, from the header of its first file to the end of its last one.
"""

from __future__ import annotations

import os
import re
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from raypod.errors import ConfigError
from raypod.system.files import sync_folder
from raypod.training.data import packing, shards
from raypod.training.data.image_files import SUFFIXES
from raypod.training.data.order import packed_order
from raypod.training.data.packed_samples import FILE_NAME, MEMBERS, kind_of_file
from raypod.training.data.shards import Field, Shard, SplitIndex
from raypod.training.data.tables import SPLIT_NAMES

_LABEL = "cls"


class _Sample(NamedTuple):
    """The files of a sample in a tar, by their suffixes."""

    key: str
    files: Dict[str, tarfile.TarInfo]


def tars_in(folder: Path) -> Optional[Dict[str, List[Path]]]:
    """Return the tars of both splits in a folder; None if there are none.

    Those of a split lie in a folder with its name, or their names contain it. Tars without the name of a split are the
    training split.
    """
    found = {split: _tars(folder, names) for split, names in zip(shards.SPLITS, SPLIT_NAMES)}
    found["test"] = [path for path in found["test"] if path not in found["train"]]
    if not found["train"]:
        found["train"] = sorted(set(folder.glob("*.tar")) - set(found["test"]))
    return found if found["train"] else None


def _tars(folder: Path, names: Sequence[str]) -> List[Path]:
    for name in names:
        for pattern in (f"{name}/*.tar", f"{name}*.tar", f"*{name}*.tar"):
            found = sorted(folder.glob(pattern))
            if found:
                return found
    return []


def index_tars(
    name: str,
    tars: Dict[str, List[Path]],
    columns: Optional[Sequence[str]],
    target: Path,
    on_tar: Callable[[int, int], object],
) -> packing.Packed:
    """Write the index of tars into the new folder `target`, with links to them.

    Args:
        name: of the data, for messages.
        tars: those of `train` and `test`.
        columns: suffixes of the files that are used; None: an image and its class, or all.
        target: the folder.
        on_tar: called with (bytes of the tars read so far, all).

    Raises:
        ConfigError: as `packing.packed_folder`, or a tar or a sample in it cannot be used.
    """
    packing.check_target(target)
    first = next(_samples(tars["train"][0]), None)
    if first is None:
        raise ConfigError(f"{tars['train'][0]} has no files of samples, as 000042.jpg and 000042.cls")
    missing = [column for column in columns or () if column not in first.files]
    if missing:
        raise ConfigError(
            f"{tars['train'][0]}: the sample {first.key} has no .{missing[0]}; it has {_listed(first.files)}"
        )
    images = [suffix for suffix in first.files if f".{suffix.rpartition('.')[2]}" in SUFFIXES]
    is_image = columns is None and len(images) == 1 and _LABEL in first.files
    wanted = tuple(columns or first.files)
    sizes = {path: path.stat().st_size for split in tars.values() for path in split}
    done, written, described = 0, {}, {}
    with packing.packed_folder(name, target) as folder:
        for split, paths in tars.items():
            (folder / shards.SPLITS[split]).mkdir()
            listed: List[Shard] = []
            rows: List[Tuple[Any, ...]] = []
            for number, path in enumerate(paths):
                place = f"{shards.SPLITS[split]}/{number:05d}.tar"
                (folder / place).symlink_to(os.path.abspath(path))  # noqa: PTH100 - `resolve` follows links
                before = len(rows)
                rows += [(number, *row) for row in _rows(path, None if is_image else wanted)]
                digest = shards.checksum_of(path)
                listed.append(Shard(file=place, bytes=sizes[path], xxh3_128=digest, samples=len(rows) - before))
                done += sizes[path]
                on_tar(done, sum(sizes.values()))
            sync_folder(folder / shards.SPLITS[split])
            written[split] = _arrays(rows, split == "train", is_image)
            described[split] = SplitIndex(samples=len(rows), shards=tuple(listed))
        most = [int(arrays["labels"].max(initial=-1)) for arrays in written.values()] if is_image else [-1]
        fields = tuple(Field(name=each, kind=kind_of_file(each)) for each in wanted)
        unused = [suffix for suffix in first.files if is_image and suffix not in (images[0], _LABEL)]
        note = f"not used: {_listed(unused)}; a --task of your own gets the files that --columns names"
        index = {
            "classes": tuple(map(str, range(max(most) + 1))),
            "structure": None if is_image else MEMBERS,
            "fields": () if is_image else fields,
            "arrays": packing.write_arrays(folder, written),
        }
        return packing.write_index(folder, {**index, **described}, [note] if unused else [])


def _arrays(rows: List[Tuple[Any, ...]], is_train: bool, is_image: bool) -> Dict[str, np.ndarray]:
    """Return the arrays of the index of a split, in the order of the samples."""
    names = ("shards", "offsets", "sizes", "checksums", *(("files", "labels") if is_image else ()))
    kinds = (np.int32, np.int64, np.int64, np.uint64, np.bytes_, np.int64)
    # The training samples get the numbers with which `packed_order` finds them in the order of the tars.
    order = np.argsort(packed_order(len(rows))) if is_train else np.arange(len(rows))
    columns = zip(*rows) if rows else ((),) * len(names)
    return {name: np.array(column, dtype=kind)[order] for name, kind, column in zip(names, kinds, columns)}


def _rows(path: Path, wanted: Optional[Tuple[str, ...]]) -> Iterator[Tuple[Any, ...]]:
    """Yield offset, size and checksum of each sample in a tar; without `wanted` also name and label of its image."""
    with path.open("rb") as tar:

        def content(begins: int, ends: int) -> bytes:
            data = os.pread(tar.fileno(), ends - begins, begins)
            if len(data) != ends - begins:
                raise ConfigError(f"{path} is truncated; copy it again")
            return data

        for key, files in _samples(path):
            named = f"{path}: the sample {key}"
            if wanted is not None:
                absent = [suffix for suffix in wanted if suffix not in files]
                if absent:
                    raise ConfigError(f"{named} has no .{absent[0]}; it has {_listed(files)}")
                used = [files[suffix] for suffix in wanted]
                begins, ends = min(each.offset for each in used), max(each.offset_data + each.size for each in used)
                yield begins, ends - begins, shards.checksum_of_sample(content(begins, ends))
                continue
            images = [suffix for suffix in files if f".{suffix.rpartition('.')[2]}" in SUFFIXES]
            if len(images) != 1 or _LABEL not in files:
                raise ConfigError(f"{named} needs an image and .{_LABEL}, and has {_listed(files)}")
            image, label = files[images[0]], files[_LABEL]
            text = content(label.offset_data, label.offset_data + label.size)
            if not re.fullmatch(rb"\s*[0-9]{1,9}\s*", text):
                raise ConfigError(f"{named}: its .{_LABEL} is {text[:20]!r}, and must be the number of a class")
            data = content(image.offset_data, image.offset_data + image.size)
            place = os.fsencode(f"{path.name}/{image.name}")
            yield image.offset_data, image.size, shards.checksum_of_sample(data), place, int(text)


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield the samples of a tar: successive files of one key. ConfigError if it cannot be read."""
    try:
        with tarfile.open(str(path), "r:") as tar:
            key, files = "", {}  # type: Tuple[str, Dict[str, tarfile.TarInfo]]
            for member in tar:
                base = member.name.rpartition("/")[2]
                found = FILE_NAME.match(member.name)
                if not member.isreg() or base.startswith((".", "__")) or found is None:
                    continue
                suffix = found.group(2).lower()
                if member.issparse():
                    raise ConfigError(f"{path}: {member.name} is a sparse file, which cannot be read in place")
                if found.group(1) != key and files:
                    yield _Sample(key, files)
                    files = {}
                if suffix in files:
                    raise ConfigError(f"{path} has two files {key}.{suffix} for one sample")
                key = found.group(1)
                files[suffix] = member
            if files:
                yield _Sample(key, files)
    except (tarfile.TarError, OSError) as error:
        raise ConfigError(f"cannot read {path} as a tar file without compression: {error}") from None


def _listed(suffixes: Any) -> str:
    return ", ".join(f".{suffix}" for suffix in suffixes)
