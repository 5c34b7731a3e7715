"""Map-style data sets of image files that are decoded on each access."""

from __future__ import annotations

import collections
import functools
import hashlib
import io
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from typing_extensions import Protocol

from raypod.errors import ConfigError, as_utf8
from raypod.training.data.pixels import TooManyPixels, lost_of, open_image
from raypod.training.data.shards import checksum_of_sample

if TYPE_CHECKING:  # imports torchvision, which planning and the prediction of other data sets do not need
    from raypod.training.data.image_decoders import Preparation

# Of the formats that Pillow decodes, on every host alike. A host whose Pillow lacks one of them cannot read its files.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".gif", ".bmp", ".dib", ".tif"),
    *(".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".jpx", ".tga", ".ico", ".pcx", ".sgi", ".qoi", ".dds"),
    *(".psd", ".ras", ".xbm", ".xpm"),
)
_KINDS_SHOWN = 8  # of skipped files
_EXAMINED = 256  # files of a split, evenly spaced: a plan reads no more
_SIZED, _HASHED = 16_384, 1024  # files of a split in its fingerprint, evenly spaced
_READERS, _CHUNK = 16, 64  # threads, and files that one of them reads at a time
KINDS = ".jpg, .png, .webp, .tif and others that Pillow decodes"  # for messages


class Files(Protocol):
    """The files of a split, by the index of the sample."""

    def read(self, index: int) -> bytes:
        """Return the content of a file. OSError if it cannot be read."""

    def size(self, index: int) -> int:
        """Return the bytes of a file. OSError if it does not exist."""

    def checksum(self, index: int) -> int:
        """Return the XXH3-64 of a file's content. OSError as `read`."""

    def name(self, index: int) -> str:
        """Return where the file is, for messages."""


class FolderFiles:
    """Files in a folder.

    Args:
        names: bytes [samples], paths relative to `root`.
    """

    def __init__(self, root: Path, names: np.ndarray) -> None:
        self._root, self._names = os.fsencode(root), names

    def read(self, index: int) -> bytes:
        """See `Files.read`."""
        with open(self._path(index), "rb", buffering=0) as file:  # noqa: PTH123 - faster than pathlib
            return file.read()

    def size(self, index: int) -> int:
        """See `Files.size`."""
        return os.stat(self._path(index)).st_size  # noqa: PTH116 - as above

    def checksum(self, index: int) -> int:
        """See `Files.checksum`."""
        return checksum_of_sample(self.read(index))

    def name(self, index: int) -> str:
        """See `Files.name`."""
        return as_utf8(os.fsdecode(self._path(index)))

    def _path(self, index: int) -> bytes:
        return os.path.join(self._root, bytes(self._names[index]))  # noqa: PTH118 - as above


class ImageWalk:
    """Finds the images below folders, also behind links, and counts what it leaves out.

    Attributes:
        skipped: the numbers of files and folders that were left out, by kind.
        linked: the number of folders that were reached by a link.
    """

    def __init__(self) -> None:
        self.skipped: Dict[str, int] = collections.Counter()
        self.linked = 0

    def images(self, folder: str, inside: FrozenSet[Tuple[int, int]] = frozenset()) -> Iterator[str]:
        """Yield the paths of the images: those in a folder, then those in its subfolders, in the order of the names.

        `inside` identifies the folders above. OSError if a folder cannot be read.
        """
        identity = _identity(folder)
        if identity in inside:
            self.skipped["linked to a folder above"] += 1
            return
        subfolders = []
        for entry in self._visible(folder):
            if entry.is_dir():
                self.linked += entry.is_symlink()
                subfolders.append(entry.path)
            elif entry.name.lower().endswith(SUFFIXES):
                yield entry.path
            else:
                self.skipped[os.path.splitext(entry.name)[1].lower() or "without a suffix"] += 1  # noqa: PTH122
        for subfolder in subfolders:
            yield from self.images(subfolder, inside | {identity})

    def classes(self, folder: Path) -> Dict[str, List[str]]:
        """Return the images of each subfolder. A folder that does not exist has none. OSError as `images`."""
        found: Dict[str, List[str]] = {}
        if not folder.is_dir():
            return found
        whole = folder.resolve()
        above = frozenset(_identity(str(each)) for each in (whole, *whole.parents))
        for entry in self._visible(str(folder)):
            if entry.is_dir():
                found[entry.name] = list(self.images(entry.path, above))
            else:
                self.skipped["outside of the class folders"] += 1
        return found

    def _visible(self, folder: str) -> List[os.DirEntry[str]]:
        """Return what is in a folder, in the order of the names, without hidden files and folders."""
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        visible = [entry for entry in found if not entry.name.startswith(".")]
        if len(visible) < len(found):
            self.skipped["hidden"] += len(found) - len(visible)
        return visible

    def report(self) -> str:
        """Return what was left out, for a message; "" for nothing."""
        kinds = sorted(self.skipped.items(), key=lambda each: -each[1])
        others = [("of other kinds", sum(number for _, number in kinds[_KINDS_SHOWN:]))] if kinds[_KINDS_SHOWN:] else []
        shown = ", ".join(f"{number} {kind}" for kind, number in [*kinds[:_KINDS_SHOWN], *others])
        return as_utf8(shown and f"skipped: {shown}")


def _identity(folder: str) -> Tuple[int, int]:
    status = os.stat(folder)  # noqa: PTH116 - faster than pathlib
    return status.st_dev, status.st_ino


class ImageFiles:
    """A map-style data set that decodes an image on each access.

    Args:
        files: the files.
        labels: int64 [samples].
        transform: makes a sample, uint8 [3, side, side], of a file or of a Pillow image.
        split: what is before the numbers of the samples in `--leave-out`.
        boxes: float32 [samples, 4], of the objects, for random crops.
    """

    draws_from_torch_only = True  # see `SeededSamples`

    def __init__(
        self,
        files: Files,
        labels: np.ndarray,
        transform: Preparation,
        split: str = "",
        boxes: Optional[np.ndarray] = None,
    ) -> None:
        self.files, self._labels, self.transform, self._split, self._boxes = files, labels, transform, split, boxes

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        """Return (image, label).

        Raises:
            OSError: the image cannot be read; the message has its path.
            ConfigError: its shard at a URL cannot be used.
        """
        try:
            box = () if self._boxes is None else (self._boxes[index].tolist(),)
            return self.transform.decode(self.files.read(index), *box), int(self._labels[index])
        except ConfigError:
            raise
        except Exception as error:  # decoders raise many exception types for damaged files
            raise OSError(
                f"cannot read the image {self.files.name(index)}: {error}; {_hint(error, f'{self._split}{index}')}"
            ) from error


def warnings_of(splits: Sequence[Tuple[Files, int]], max_pixels: int) -> List[str]:
    """Return a line for each kind of loss: the number of images that have it, and the first one.

    Up to 256 images of each split are opened, given as its files and their number. Those with more than `max_pixels`
    pixels cannot be used.
    """
    numbers: Dict[str, int] = collections.Counter()
    first: Dict[str, str] = {}
    examined = [(files, index) for files, count in splits for index in range(0, count, -(-count // _EXAMINED) or 1)]
    for files, index in examined:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of damaged images
                with open_image(io.BytesIO(files.read(index)), max_pixels) as image:
                    lost = list(lost_of(image))
        except TooManyPixels:
            lost = [f"with more pixels than --max-image-pixels {max_pixels} (cannot be used)"]
        except Exception:  # noqa: BLE001 - decoders raise many exception types for damaged files
            lost = ["that cannot be opened"]
        for kind in lost:
            numbers[kind] += 1
            first.setdefault(kind, files.name(index))
    return [f"{numbers[kind]} of {len(examined)} images {kind}, as {first[kind]}" for kind in sorted(numbers)]


def contents_of(splits: Sequence[Tuple[Files, int]]) -> str:
    """Return a hash of the sizes of up to 16,384 files of each split, and of the contents of up to 1,024 of them.

    The splits are given as their files and the numbers of these. A file that cannot be read counts as empty here.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as pool:  # a network disk answers them at the same time
        for files, count in splits:
            for measure, most in ((files.size, _SIZED), (files.checksum, _HASHED)):
                indices = range(0, count, -(-count // most) or 1)
                parts = [indices[first : first + _CHUNK] for first in range(0, len(indices), _CHUNK)]
                for values in pool.map(functools.partial(_measured, measure), parts):
                    digest.update(np.array(values, dtype="<u8").tobytes())
    return digest.hexdigest()[:16]


def _measured(measure: Callable[[int], int], indices: Sequence[int]) -> List[int]:
    values = []
    for index in indices:
        try:
            values.append(measure(index))
        except OSError:
            values.append(0)
    return values


def _hint(error: Exception, sample: str) -> str:
    """Return what to do about an image that cannot be read: true with a checkpoint and without one."""
    more = "accept more with --max-image-pixels, or " if isinstance(error, TooManyPixels) else ""
    return (
        f"replace it (a run that resumes then needs --resume-anyway data_fingerprint), or {more}leave it out with "
        f"--leave-out {sample}"
    )
