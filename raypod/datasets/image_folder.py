"""Folders of images as ImageNet's are laid out: `train/CLASS/...` and `val/CLASS/...` (or `test/`), JPEG or PNG.

Too many to lie in memory: the samples are decoded one by one, in worker processes. What is shared by the instances of a
host is the list of the files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np

from raypod.datasets.arrays import ImageShape, Splits, fingerprint_of_bytes
from raypod.datasets.cache import Cache, identity_of
from raypod.errors import ConfigError, DataMissing
from raypod.host import torchvision_import
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize

SIDE = 224  # of images, where --image-size says nothing
_RESIZE = 256 / 224  # before the centre is cropped for evaluation (He et al. 2016)
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
_IMAGENET_CLASSES = 1000
_SUFFIXES = (".jpg", ".jpeg", ".png")


def size(config: Config) -> DatasetSize:
    """Out of the cache, or counted in the folders; nothing is written, and no image is opened."""
    root = _root(config)
    found = Cache(config, root).find(_identity(root))
    files = _list_files(root) if found is None else found
    return DatasetSize(len(files["train_labels"]), len(files["test_labels"]))


def shape(config: Config) -> ImageShape:
    """Colour images of the size that they are cropped to."""
    is_imagenet = config.data.dataset == "imagenet"  # its plan needs no files
    classes = _IMAGENET_CLASSES if is_imagenet else len(_classes(_root(config)))
    return ImageShape(3, config.data.image_size or SIDE, classes)


def load(config: Config) -> Splits:
    """Map-style data sets of (uint8 [3, side, side], label).

    Training images are random pieces, resized and mirrored at random; of test images the centre is taken.

    Raises:
        ConfigError: a folder is missing or holds no images.
    """
    root, data = _root(config), config.data
    files = Cache(config, root).find_or_make(_identity(root), lambda: _list_files(root))
    side = data.image_size or SIDE
    train, test = files["train_files"], files["test_files"]
    labels = files["train_labels"], files["test_labels"]
    random = _random_piece(side, data.flip is not False) if data.augment else _centre(side)
    return Splits(
        train=ImageFiles(root, train, labels[0], random),
        test=ImageFiles(root, test, labels[1], _centre(side)),
        classes=len(_classes(root)),
        fingerprint=fingerprint_of_bytes(train, test, *labels),
        mean=_MEAN,
        std=_STD,
    )


class ImageFiles:
    """Images that are decoded when they are asked for.

    Args:
        files: bytes [samples], paths below `root`.
        labels: int64 [samples].
        transform: of a Pillow image in RGB to uint8 [3, side, side]; draws from torch's random numbers.
    """

    def __init__(self, root: Path, files: np.ndarray, labels: np.ndarray, transform: Callable[[Any], Any]) -> None:
        self._root, self._files, self._labels, self._transform = str(root), files, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        """(image, label); OSError names an image that cannot be read."""
        from PIL import Image

        path = os.path.join(self._root, os.fsdecode(bytes(self._files[index])))  # noqa: PTH118 - a million times
        try:
            with Image.open(path) as image:
                return self._transform(image.convert("RGB")), int(self._labels[index])
        except Exception as error:  # of a damaged file Pillow raises any kind
            raise OSError(f"cannot read the image {path}: {error}; replace it, or remove it") from error


def _random_piece(side: int, flips: bool) -> Callable[[Any], Any]:
    transforms = _torchvision_transforms()
    steps = [transforms.RandomResizedCrop(side)]
    steps += [transforms.RandomHorizontalFlip()] if flips else []
    composed: Callable[[Any], Any] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


def _centre(side: int) -> Callable[[Any], Any]:
    transforms = _torchvision_transforms()
    steps = [transforms.Resize(round(side * _RESIZE)), transforms.CenterCrop(side), transforms.PILToTensor()]
    composed: Callable[[Any], Any] = transforms.Compose(steps)
    return composed


def _torchvision_transforms() -> Any:
    torchvision_import.install()
    from torchvision import transforms

    return transforms


def _root(config: Config) -> Path:
    if config.data.data_dir is None:
        raise DataMissing(f"--dataset {config.data.dataset} needs --data-dir: the folder that holds train/ and val/")
    root = Path(config.data.data_dir).expanduser()
    if not _classes(root):
        raise DataMissing(
            f"--dataset {config.data.dataset}: {root / 'train'} has no folders of classes; expected are "
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


def _identity(root: Path) -> str:
    """A folder's time changes when a file comes or goes: a thousand of them are asked instead of a million files."""
    classes = [split / name for split in (root / "train", _test_folder(root)) for name in _folders(split)]
    return identity_of(folder for folder_of_class in classes for folder in _with_nested(folder_of_class))


def _with_nested(folder: Path) -> List[Path]:
    """A folder and all below it. Two links (its name and its own dot) mean none: nobody has to look at its files."""
    if folder.stat().st_nlink == 2:
        return [folder]
    return sorted(Path(where) for where, _, _ in os.walk(str(folder)))


def _list_files(root: Path) -> Dict[str, np.ndarray]:
    numbers = {name: number for number, name in enumerate(_classes(root))}
    found: Dict[str, np.ndarray] = {}
    for split, folder in (("train", root / "train"), ("test", _test_folder(root))):
        unknown = set(_folders(folder)) - set(numbers)
        if unknown:
            raise ConfigError(f"{folder / min(unknown)} is a class that {root / 'train'} does not have")
        pairs = [(file, numbers[name]) for name in _folders(folder) for file in _images(root, folder / name)]
        found[f"{split}_files"] = np.array([file for file, _ in pairs], dtype=np.bytes_)
        found[f"{split}_labels"] = np.array([number for _, number in pairs], dtype=np.int64)
    if not len(found["train_labels"]):
        raise ConfigError(f"the folders in {root / 'train'} hold no images ({', '.join(_SUFFIXES)})")
    return found


def _images(root: Path, folder: Path) -> Iterator[bytes]:
    """Paths below `root`, in order."""
    for where, folders, files in os.walk(str(folder)):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(_SUFFIXES):
                yield os.fsencode(os.path.relpath(os.path.join(where, name), str(root)))  # noqa: PTH118 - a million
