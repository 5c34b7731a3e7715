"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) in torchvision's folders: pickled batches of 32x32 colour images."""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.system.files import looked_in
from raypod.training.data.arrays import ArrayDataset, Augmentation, ImageShape, Splits, fingerprint_of
from raypod.training.data.cache import Archive, Arrays, Cache, data_dir, download

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class Cifar:
    """One of the two data sets: its archive, the names of its files, and the statistics of its images."""

    archive: Archive
    train_files: Tuple[str, ...]
    test_file: str
    label_key: str
    classes: int
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    names: Tuple[str, ...] = ()  # of the classes

    def size(self, config: Config) -> DatasetSize:
        """Return the numbers of samples, from the cache or counted in the files; writes nothing."""
        files = self._files(config)
        arrays = Cache(config, files[0].parent, files).read(lambda: self._read(files))
        return DatasetSize(len(arrays["train_labels"]), len(arrays["test_labels"]))

    def shape(self, config: Config) -> ImageShape:
        """Return the shape of the images, which all files have."""
        return ImageShape(3, 32, self.classes)

    def load(self, config: Config) -> Splits:
        """Return the arrays, which the instances of a host share; downloads them first if the config says so.

        Raises:
            ConfigError: files are missing or damaged, or the download fails.
        """
        self.download(config)
        files = self._files(config)
        arrays = Cache(config, files[0].parent, files).get(lambda: self._read(files))
        train = ArrayDataset(arrays["train_images"], arrays["train_labels"])
        test = ArrayDataset(arrays["test_images"], arrays["test_labels"])
        augmentation = Augmentation(padding=4, flip=True)
        fingerprint = fingerprint_of(train, test)
        return Splits(train, test, self.classes, fingerprint, self.mean, self.std, augmentation, self.names)

    def download(self, config: Config) -> None:
        """Download the archive if `data.download` is set and its folder does not exist."""
        folder = self._folder(config)
        if config.data.download and not folder.is_dir():
            download(self.archive, folder.parent, config.run.start_timeout_s)

    def _folder(self, config: Config) -> Path:
        root = data_dir(config, f"{self.archive.folder}/")
        return root if root.name == self.archive.folder else root / self.archive.folder

    def _files(self, config: Config) -> List[Path]:
        """Return the training files, followed by the test file."""
        folder = self._folder(config)
        files = [folder / file for file in (*self.train_files, self.test_file)]
        for file in files:
            if not file.is_file():
                unpack = f"unpack {self.archive.name} in {folder.parent}"
                remedy = f"{unpack} again" if folder.is_dir() else f"{unpack}, or add --download"
                raise DataMissing(f"--dataset {config.data.dataset}: {file} does not exist{looked_in(file)}; {remedy}")
        return files

    def _read(self, files: List[Path]) -> Arrays:
        batches = [self._read_batch(file) for file in files]
        return {
            "train_images": np.concatenate([images for images, _ in batches[:-1]]),
            "train_labels": np.concatenate([labels for _, labels in batches[:-1]]),
            "test_images": batches[-1][0],
            "test_labels": batches[-1][1],
        }

    def _read_batch(self, file: Path) -> Tuple[np.ndarray, np.ndarray]:
        try:
            content = _Unpickler(io.BytesIO(file.read_bytes()), encoding="latin1").load()
            images, labels = content["data"], np.asarray(content[self.label_key], dtype=np.int64)
            if images.dtype != np.uint8 or images.shape != (len(labels), _PIXELS):
                raise ValueError(f"{images.dtype} {images.shape} for {len(labels)} labels")
            if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
                raise ValueError(f"labels from {labels.min()} to {labels.max()} for {self.classes} classes")
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 - unpickling a damaged file can raise any exception
            raise ConfigError(
                f"{file} is damaged or is not a batch of {self.archive.folder} ({type(error).__name__}: {error}); "
                f"unpack {self.archive.name} again"
            ) from None
        return images.reshape(-1, *_SHAPE), labels


class _Unpickler(pickle.Unpickler):
    """Load arrays and plain values only, so that an untrusted file cannot execute code."""

    _ALLOWED = (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),  # Python 3 pickles bytes this way in protocol 2
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return an allowed global."""
        if (module_name, global_name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")
        if global_name == "_reconstruct":  # its module was renamed in numpy 2
            return np.zeros(0).__reduce__()[0]
        return super().find_class(module_name, global_name)


CIFAR10 = Cifar(
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
    ),
    train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test_file="test_batch",
    label_key="labels",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)

CIFAR100 = Cifar(
    archive=Archive(
        "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
    ),
    train_files=("train",),
    test_file="test",
    label_key="fine_labels",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)
