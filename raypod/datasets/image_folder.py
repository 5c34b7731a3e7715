"""Folders of JPEG or PNG images in ImageNet's layout: `train/CLASS/...` and `val/CLASS/...` (or `test/`).

Samples are decoded one by one in worker processes; the cache contains only the list of files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

import numpy as np

from raypod.datasets.arrays import ImageShape, Splits, fingerprint_of_bytes
from raypod.datasets.cache import Arrays, Cache, data_dir
from raypod.errors import ConfigError, DataMissing
from raypod.host import torchvision_import
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize

SIDE = 224  # default image size in pixels
_RESIZE = 256 / 224  # before the center crop of evaluation (He et al. 2016)
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_IMAGENET_CLASSES = 1000
SUFFIXES = (".jpg", ".jpeg", ".png")


def size(config: Config) -> DatasetSize:
    """Return the numbers of samples, from the cache or counted in the folders; writes nothing and opens no image."""
    root = _root(config)
    return Cache(config, root, _class_folders(root)).size(lambda: _list_files(root))


def shape(config: Config) -> ImageShape:
    """Return the shape of the cropped images and the number of classes; for `imagenet` without reading files."""
    is_imagenet = config.data.dataset == "imagenet"
    classes = _IMAGENET_CLASSES if is_imagenet else len(_classes(_root(config)))
    return ImageShape(3, config.data.image_size or SIDE, classes)


def load(config: Config) -> Splits:
    """Return map-style data sets of (uint8 [3, side, side], label).

    Training images are random resized crops, flipped at random; test images are center crops.

    Raises:
        ConfigError: a folder is missing or contains no images.
    """
    root, data = _root(config), config.data
    files = Cache(config, root, _class_folders(root)).get(lambda: _list_files(root))
    side = data.image_size or SIDE
    train, test = files["train_files"], files["test_files"]
    labels = files["train_labels"], files["test_labels"]
    augmented = _random_crop(side, data.flip is not False) if data.augment else _center_crop(side)
    return Splits(
        train=ImageFiles(root, train, labels[0], augmented),
        test=ImageFiles(root, test, labels[1], _center_crop(side)),
        classes=len(_classes(root)),
        fingerprint=fingerprint_of_bytes(train, test, *labels),
        mean=_MEAN,
        std=_STD,
        names=tuple(_classes(root)),
    )


class ImageFiles:
    """A map-style data set that decodes an image on each access.

    Args:
        files: bytes [samples], paths relative to `root`.
        labels: int64 [samples].
        transform: maps a Pillow image in RGB to uint8 [3, side, side], with torch's global random numbers.
    """

    def __init__(self, root: Path, files: np.ndarray, labels: np.ndarray, transform: Callable[[Any], Any]) -> None:
        self._root, self._files, self._labels, self.transform = str(root), files, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        """Return (image, label).

        Raises:
            OSError: the image cannot be read; the message has its path.
        """
        from PIL import Image  # planning works without Pillow

        path = os.path.join(self._root, os.fsdecode(bytes(self._files[index])))  # noqa: PTH118 - faster than pathlib
        try:
            with Image.open(path) as image:
                return self.transform(image.convert("RGB")), int(self._labels[index])
        except Exception as error:  # Pillow raises many exception types for damaged files
            raise OSError(f"cannot read the image {path}: {error}; replace it, or remove it") from error


def _random_crop(side: int, flips: bool) -> Callable[[Any], Any]:
    transforms = _torchvision_transforms()
    flip = [transforms.RandomHorizontalFlip()] if flips else []
    composed: Callable[[Any], Any] = transforms.Compose(
        [transforms.RandomResizedCrop(side), *flip, transforms.PILToTensor()]
    )
    return composed


def _center_crop(side: int) -> Callable[[Any], Any]:
    transforms = _torchvision_transforms()
    composed: Callable[[Any], Any] = transforms.Compose(
        [transforms.Resize(round(side * _RESIZE)), transforms.CenterCrop(side), transforms.PILToTensor()]
    )
    return composed


def _torchvision_transforms() -> Any:
    torchvision_import.install()
    from torchvision import transforms  # planning must not import torch

    return transforms


def _root(config: Config) -> Path:
    root = data_dir(config, "train/ and val/")
    if not _classes(root):
        raise DataMissing(
            f"--dataset {config.data.dataset}: {root / 'train'} has no class folders; expected "
            f"{root}/train/CLASS/*.jpg (or .jpeg, .png) and {root}/val/CLASS/* (or test/)"
        )
    return root


def _classes(root: Path) -> List[str]:
    return _folders(root / "train")


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


def _list_files(root: Path) -> Arrays:
    numbers = {name: number for number, name in enumerate(_classes(root))}
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
