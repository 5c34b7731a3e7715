"""Folders of JPEG or PNG images in ImageNet's layout: `train/CLASS/...` and `val/CLASS/...` (or `test/`).

Samples are decoded one by one in worker processes; the cache contains only the list of files. A folder that
`raypod pack` has written is read from its shards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, List, Tuple

import numpy as np

from raypod.datasets import shards
from raypod.datasets.arrays import ImageShape, Splits, fingerprint_of_bytes
from raypod.datasets.cache import Arrays, Cache, data_dir
from raypod.datasets.image_files import Files, FolderFiles, ImageFiles
from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import IMAGE_SIDE, Config
from raypod.plan.plan import DatasetSize
from raypod.plan.urls import is_url

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_IMAGENET_CLASSES = 1000
JPEG_SUFFIXES = (".jpg", ".jpeg")
SUFFIXES = (*JPEG_SUFFIXES, ".png")


def size(config: Config) -> DatasetSize:
    """Return the numbers of samples, from the cache or counted in the folders; writes nothing and opens no image."""
    root = _root(config)
    if shards.is_packed(root):
        index = shards.read_index(root)
        shards.check_sizes(root, index)
        return DatasetSize(index.train.samples, index.test.samples)
    return Cache(config, root, _class_folders(root)).size(lambda: list_files(root))


def shape(config: Config) -> ImageShape:
    """Return the shape of the cropped images and the number of classes; for `imagenet` without reading files."""
    is_imagenet = config.data.dataset == "imagenet"
    classes = _IMAGENET_CLASSES if is_imagenet else len(class_names(_root(config)))
    return ImageShape(3, config.data.image_size or IMAGE_SIDE, classes)


def load(config: Config) -> Splits:
    """Return map-style data sets of (uint8 [3, side, side], label).

    Training images are random resized crops, flipped at random; test images are center crops.

    Raises:
        ConfigError: a folder is missing or contains no images, or shards are damaged.
    """
    from raypod.datasets.image_decoders import preparation  # imports torch, which planning must not

    root, data = _root(config), config.data
    index = shards.read_index(root) if shards.is_packed(root) else None
    if index is not None:
        shards.check_sizes(root, index)
        arrays = shards.read_arrays(root, index)
    else:
        arrays = Cache(config, root, _class_folders(root)).get(lambda: list_files(root))

    def files_of(split: str) -> Files:
        if index is None:
            return FolderFiles(root, arrays[f"{split}_files"])
        columns = {name: arrays[f"{split}_{name}"] for name in shards.COLUMNS}
        return shards.PackedFiles(root, getattr(index, split).shards, columns)

    side, decoder = data.image_size or IMAGE_SIDE, data.jpeg_decoder
    labels = arrays["train_labels"], arrays["test_labels"]
    names = class_names(root)
    train = preparation(decoder, side, is_random=data.augment, flips=data.flip is not False)
    test = preparation(decoder, side, is_random=False, flips=False)
    return Splits(
        train=ImageFiles(files_of("train"), labels[0], train),
        test=ImageFiles(files_of("test"), labels[1], test),
        classes=len(names),
        fingerprint=fingerprint_of_bytes(arrays["train_files"], arrays["test_files"], *labels),
        mean=_MEAN,
        std=_STD,
        names=names,
    )


def class_names(root: Path) -> Tuple[str, ...]:
    """Return the names of the classes, by label, of an image folder or a packed one."""
    if shards.is_packed(root):
        return shards.read_index(root).classes
    return tuple(_folders(root / "train"))


def _root(config: Config) -> Path:
    if config.data.data_dir is not None and is_url(config.data.data_dir):
        raise ConfigError(
            f"--data-dir {config.data.data_dir}: images are read from a folder of the host, not from a URL; copy the "
            "folder, or the shards that `raypod pack` writes, to every host first"
        )
    root = data_dir(config, "train/ and val/")
    if not shards.is_packed(root) and (root / shards.ARRAYS).is_dir():
        raise ConfigError(f"{root} has shards, but no {shards.INDEX}: it is incomplete; copy it again, or pack again")
    if not class_names(root):
        raise DataMissing(
            f"--dataset {config.data.dataset}: {root / 'train'} has no class folders; expected "
            f"{root}/train/CLASS/*.jpg (or .jpeg, .png) and {root}/val/CLASS/* (or test/), or what `raypod pack` writes"
        )
    return root


def _folders(folder: Path) -> List[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(str(folder)) if entry.is_dir())


def _test_folder(root: Path) -> Path:
    return root / "val" if (root / "val").is_dir() else root / "test"


def _class_folders(root: Path) -> Iterator[Path]:
    """Yield all folders below the class folders, and these.

    Adding or removing a file changes the modification time of its folder: the cache reads the times of a thousand
    folders instead of a million files.
    """
    for split in (root / "train", _test_folder(root)):
        for name in _folders(split):
            yield from _with_subfolders(split / name)


def _with_subfolders(folder: Path) -> List[Path]:
    """Return a folder and all folders below it, in order."""
    if folder.stat().st_nlink == 2:  # its name and its own ".": no subfolders, so its files need not be listed
        return [folder]
    return sorted(Path(where) for where, _, _ in os.walk(str(folder)))


def list_files(root: Path) -> Arrays:
    """Return the paths relative to `root` and the labels of both splits: train_files, train_labels, ...

    Raises:
        ConfigError: there are no training images, or a class has only test images.
    """
    numbers = {name: number for number, name in enumerate(class_names(root))}
    found: Arrays = {}
    for split, folder in (("train", root / "train"), ("test", _test_folder(root))):
        unknown = set(_folders(folder)) - set(numbers)
        if unknown:
            raise ConfigError(f"{folder / min(unknown)} is a class that {root / 'train'} does not have")
        pairs = [(file, numbers[name]) for name in _folders(folder) for file in _images(root, folder / name)]
        found[f"{split}_files"] = np.array([file for file, _ in pairs], dtype=np.bytes_)
        found[f"{split}_labels"] = np.array([number for _, number in pairs], dtype=np.int64)
    if not len(found["train_labels"]):
        raise ConfigError(f"the folders in {root / 'train'} contain no images ({', '.join(SUFFIXES)})")
    return found


def _images(root: Path, folder: Path) -> Iterator[bytes]:
    """Yield the paths of the images below `folder`, relative to `root`, in order."""
    for where, folders, files in os.walk(str(folder)):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(SUFFIXES):
                yield os.fsencode(os.path.relpath(os.path.join(where, name), str(root)))  # noqa: PTH118 - faster
