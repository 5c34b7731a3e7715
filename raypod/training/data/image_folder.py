"""Folders of images in ImageNet's layout: `train/CLASS/...` and `val/CLASS/...` (or `test/`).

Samples are decoded one by one in worker processes; the cache contains only the list of files. A folder that
`raypod pack` has written is read from its shards.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import numpy as np

from raypod.errors import ConfigError, DataMissing, as_utf8
from raypod.plan.config import BOXES, CONTENTS, IMAGE_SIDE, TEST_SAMPLE, Config
from raypod.plan.plan import DatasetSize
from raypod.system.command_line import counted
from raypod.system.files import looked_in
from raypod.system.urls import is_url
from raypod.training.data import packed_samples, shards
from raypod.training.data.arrays import ImageShape, Splits, fingerprint_of_bytes
from raypod.training.data.bounding_boxes import boxes_of
from raypod.training.data.cache import Arrays, Cache, data_dir
from raypod.training.data.image_files import KINDS, FolderFiles, ImageFiles, ImageWalk, contents_of, warnings_of
from raypod.training.data.shard_stream import Packed, StreamedShards

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_IMAGENET_CLASSES = 1000


def size(config: Config) -> DatasetSize:
    """Return the numbers of samples, and what is lost of their pixels; writes nothing and opens only a few images."""
    packed = _packed(config)
    if packed is not None:
        found = packed_samples.size_of(packed, config)
        if isinstance(packed, StreamedShards):
            return found
        arrays = packed.arrays()
        lost = _lost(config, [packed.files(split, arrays) for split in shards.SPLITS], arrays)
        return dataclasses.replace(found, notes=(*found.notes, *lost))
    root = _root(config)
    arrays = _arrays(config, root, writes=False)
    _boxes(config, arrays)
    skipped = [os.fsdecode(each) for each in arrays["skipped"].tolist() if each]
    lost = _lost(config, [FolderFiles(root, arrays[f"{split}_files"]) for split in shards.SPLITS], arrays)
    return DatasetSize(len(arrays["train_labels"]), len(arrays["test_labels"]), notes=(*skipped, *lost))


def _lost(config: Config, files: List[Any], arrays: Arrays) -> List[str]:
    """Return warnings about what is lost of the pixels of both splits."""
    counts = [len(arrays[f"{split}_labels"]) for split in shards.SPLITS]
    return [f"WARNING: {each}" for each in warnings_of(list(zip(files, counts)), config.data.max_image_pixels)]


def shape(config: Config) -> ImageShape:
    """Return the shape of the cropped images and the number of classes; for `imagenet` without reading files."""
    classes = _IMAGENET_CLASSES
    if config.data.dataset != "imagenet":
        packed = _packed(config)
        names = class_names(_arrays(config, _root(config), writes=False)) if packed is None else packed.index.classes
        classes = len(names)
    return ImageShape(3, config.data.image_size or IMAGE_SIDE, classes)


def load(config: Config) -> Splits:
    """Return map-style data sets of (uint8 [3, side, side], label).

    Training images are random resized crops, flipped at random; test images are center crops.

    Raises:
        ConfigError: a folder is missing or contains no images, shards are damaged, or bounding boxes cannot be used.
    """
    from raypod.training.data.image_decoders import (  # imports torch, which planning must not
        FurtherChanged,
        preparation,
    )

    packed, data = _packed(config), config.data
    arrays = _arrays(config, _root(config), writes=True) if packed is None else packed.arrays()
    if packed is not None and data.shuffle_window is not None:
        shards.check_order(packed, packed.index, arrays)
    side, decoder, limit = data.image_size or IMAGE_SIDE, data.jpeg_decoder, data.max_image_pixels
    labels = arrays["train_labels"], arrays["test_labels"]
    names = class_names(arrays) if packed is None else packed.index.classes
    train_files, test_files = (
        FolderFiles(_root(config), arrays[f"{split}_files"]) if packed is None else packed.files(split, arrays)
        for split in shards.SPLITS
    )
    listed = fingerprint_of_bytes(arrays["train_files"], arrays["test_files"], *labels)
    contents = contents_of([(train_files, len(labels[0])), (test_files, len(labels[1]))])
    boxes = _boxes(config, arrays)
    if boxes is not None:
        contents = f"{contents}{BOXES}{fingerprint_of_bytes(boxes)[:16]}"
    train = preparation(decoder, side, is_random=data.augment, flips=data.flip is not False, max_pixels=limit)
    if data.policy or data.random_erasing:
        train = FurtherChanged(train, data, _MEAN)
    test = preparation(decoder, side, is_random=False, flips=False, max_pixels=limit)
    return Splits(
        train=ImageFiles(train_files, labels[0], train, boxes=boxes),
        test=ImageFiles(test_files, labels[1], test, TEST_SAMPLE),
        classes=len(names),
        fingerprint=f"{listed}{CONTENTS}{contents}",
        mean=_MEAN,
        std=_STD,
        names=names,
    )


def _boxes(config: Config, arrays: Arrays) -> Optional[np.ndarray]:
    file = config.data.bounding_boxes
    return None if file is None else boxes_of(file, arrays["train_files"])


def class_names(arrays: Arrays) -> Tuple[str, ...]:
    """Return the names of the classes, by label, of `list_files`."""
    first = np.unique(arrays["train_labels"], return_index=True)[1]
    return tuple(as_utf8(os.fsdecode(bytes(arrays["train_files"][index]).split(b"/")[1])) for index in first)


def _root(config: Config) -> Path:
    root = data_dir(config, "train/ and val/")
    if not shards.is_packed(root) and (root / shards.ARRAYS).is_dir():
        raise ConfigError(f"{root} has shards, but no {shards.INDEX}: it is incomplete; copy it again, or pack again")
    if not root.is_dir():
        raise DataMissing(
            f"--data-dir {root} does not exist{looked_in(root)}: --dataset {config.data.dataset} reads it"
        )
    if not shards.is_packed(root) and not has_classes(root):
        raise DataMissing(
            f"--dataset {config.data.dataset}: {root / 'train'} has no class folders; expected "
            f"{root}/train/CLASS/*.jpg (or .png, .webp, .tif, ...) and {root}/val/CLASS/* (or test/), or what "
            "`raypod pack` writes"
        )
    return root


def _packed(config: Config) -> Optional[Packed]:
    """Return what `raypod pack` has written, whose shards are complete; None for another folder."""
    packed: Optional[Packed] = None
    if config.data.data_dir is not None and is_url(config.data.data_dir):
        packed = StreamedShards(config)
    else:
        root = _root(config)
        packed = shards.PackedFolder(root) if shards.is_packed(root) else None
    if packed is not None:
        if config.data.bounding_boxes is not None:
            raise ConfigError(
                f"--bounding-boxes {config.data.bounding_boxes} has no effect on shards, which {packed} has: "
                "omit it, or train with the folder that was packed"
            )
        packed_samples.check_no_text(packed)
        if packed.index.structure is not None:
            raise ConfigError(
                f"{packed} has no images of a folder: train with the --task whose data was packed, or with --dataset "
                "shards"
            )
        return packed
    if config.data.shuffle_window is not None:
        raise ConfigError(
            f"--shuffle-window {config.data.shuffle_window}: {root} has no shards; omit it, or pack the images with "
            "`raypod pack`"
        )
    return None


def _arrays(config: Config, root: Path, writes: bool) -> Arrays:
    """Return the files and labels of both splits; from the cache, into which they are written if `writes`."""
    cache = Cache(config, root, _class_folders(root))
    arrays = (cache.get if writes else cache.read)(lambda: list_files(root))
    return list_files(root) if arrays["linked"].any() else arrays  # the key of the cache does not cover their files


def has_classes(root: Path) -> bool:
    """Whether a folder has class folders, which may be empty."""
    return bool(_folders(root / "train"))


def _folders(folder: Path) -> List[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(str(folder)) if entry.is_dir() and not entry.name.startswith("."))


def _test_folder(root: Path) -> Path:
    return root / "val" if (root / "val").is_dir() else root / "test"


def _class_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the splits, the class folders, and all folders below them.

    Adding or removing a file changes the modification time of its folder: the cache reads the times of a thousand
    folders instead of a million files.
    """
    for split in (root / "train", _test_folder(root)):
        if split.is_dir():
            yield split
        for name in _folders(split):
            yield from _with_subfolders(split / name)


def _with_subfolders(folder: Path) -> List[Path]:
    """Return a folder and all folders below it, in order."""
    if folder.stat().st_nlink == 2:  # its name and its own ".": no subfolders, so its files need not be listed
        return [folder]
    return sorted(Path(where) for where, _, _ in os.walk(str(folder)))


def list_files(root: Path) -> Arrays:
    """Return the paths relative to `root` and the labels of both splits: train_files, train_labels, ...

    Also `skipped`, a line about what is no image, and `linked`, the number of folders behind links below class folders.

    Raises:
        ConfigError: there are no training images, a class has only test images, or a folder cannot be read.
    """
    train, test, walk = root / "train", _test_folder(root), ImageWalk()
    try:
        by_split = {"train": (train, walk.classes(train)), "test": (test, walk.classes(test))}
    except OSError as error:
        raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}") from None
    trained, tested = by_split["train"][1], by_split["test"][1]
    numbers = {name: number for number, name in enumerate(name for name, images in trained.items() if images)}
    if not numbers:
        raise ConfigError(f"the folders in {train} contain no images ({KINDS})")
    for name, images in tested.items():
        if name not in trained or (images and name not in numbers):
            reason = f"which has no images in {train}" if name in trained else f"that {train} does not have"
            raise ConfigError(f"{test / name} is a class {reason}")
    empty = [train / name for name in trained if name not in numbers]
    found: Arrays = {}
    for split, (folder, classes) in by_split.items():
        start = len(str(folder))
        pairs = [(file[start:], numbers[name]) for name, images in classes.items() for file in images]
        found[f"{split}_files"] = np.array([os.fsencode(folder.name + file) for file, _ in pairs], dtype=np.bytes_)
        found[f"{split}_labels"] = np.array([number for _, number in pairs], dtype=np.int64)
    classes_without = f"WARNING: {counted(len(empty), 'class folder')} without images, as {empty[0]}" if empty else ""
    found["skipped"] = np.array([os.fsencode(line) for line in (as_utf8(classes_without), walk.report())])
    found["linked"] = np.array([walk.linked])
    return found
