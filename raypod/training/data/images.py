"""Images and labels as batches: checked, augmented, resized, normalized and cast, on the host or for the device."""

from __future__ import annotations

import warnings
from typing import Any, Optional, Tuple

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.plan.config import VISION_TRANSFORMERS, Config
from raypod.training.data.arrays import ArrayDataset, Splits
from raypod.training.data.mixing import pair_words
from raypod.training.data.source import FIRST, Batch, Source
from raypod.training.data.transforms import activation_dtype, gather, normalize, resize

_CHANNELS = (1, 3, 4)  # of common images


class ImageSource(Source):
    """The splits of an image data set. A batch is (images [n, channels, height, width], labels int64 [n])."""

    def __init__(self, config: Config, splits: Splits) -> None:
        self._config, self._splits, self.first = config, splits, config.data.first_sample
        self.train, self.test, self.fingerprint = splits.train, splits.test, splits.fingerprint
        self.is_in_memory = isinstance(splits.train, ArrayDataset)
        self._host_size = _host_size(splits, config.data.eight_bit_io, config.data.image_size)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`."""
        images, labels = gather(split, samples, self._splits.augmentation, seed_and_epoch, self._host_size)
        return self.to_device_format((torch.from_numpy(images), torch.from_numpy(labels)))

    def with_pairs(self, batch: Batch, samples: np.ndarray, micro_batch: int, seed_and_epoch: Tuple[int, int]) -> Batch:
        """See `Source.with_pairs`: mixup and cutmix."""
        height, width = batch[0].shape[2:]
        size = self._config.data.image_size
        mixed_size = (height, width) if size is None else (size, size)
        words = pair_words(self._config.data, samples, micro_batch, seed_and_epoch, mixed_size)
        return batch if words is None else (*batch, torch.from_numpy(words))

    def check_sample(self, sample: Any, name: str = FIRST) -> None:
        """See `Source.check_sample`."""
        dataset = self._config.data.dataset
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ConfigError(f"{dataset}: a sample must be (image, label), but {name} is a {type(sample).__name__}")
        image, label = sample
        if not isinstance(image, (torch.Tensor, np.ndarray)):
            kind = type(image).__name__
            raise ConfigError(f"{dataset}: images must be torch tensors or NumPy arrays, but {name} is a {kind}")
        of = "" if name == FIRST else f" as that of {name}"
        if image.ndim != 3:
            raise ConfigError(f"{dataset}: images must be [channels, height, width], not {list(image.shape)}{of}")
        if not _is_image(image):
            raise ConfigError(
                f"{dataset}: images must be uint8, which are divided by 255, or floating-point numbers, which are used "
                f"as they are, not {str(image.dtype).rpartition('.')[2]}{of}; convert them in your data set"
            )
        if not isinstance(label, (int, np.integer, np.ndarray, torch.Tensor)):
            kind = type(label).__name__
            raise ConfigError(f"{dataset}: labels must be integers, one per image, not {kind}{of}")
        try:
            self._check_labels(torch.as_tensor(label).reshape(1))
        except ConfigError as error:
            raise ConfigError(f"{error}{of and f' (the label of {name})'}") from None
        except (RuntimeError, TypeError):  # several numbers, or no number
            raise ConfigError(f"{dataset}: labels must be integers, one per image, not {label!r:.80}{of}") from None

    def to_device_format(self, batch: Any) -> Batch:
        """Check the labels; resize, normalize and cast the images, except for what the device does with 8-bit IO."""
        images, labels = batch
        self._check_labels(labels)
        data, size = self._config.data, self._host_size
        if size is not None and images.shape[-2:] != (size, size):
            images = self._resized(images, size)
        if data.eight_bit_io:
            if images.dtype != torch.uint8:
                raise ConfigError(f"--eight-bit-io needs uint8 images, but those of {data.dataset} are {images.dtype}")
            return images, labels
        dtype = activation_dtype(self._config.training.precision)
        if images.dtype == torch.uint8:
            return normalize(images, self._splits.mean, self._splits.std, dtype), labels
        return images.to(dtype), labels

    def _check_labels(self, labels: torch.Tensor) -> None:
        """Raise a ConfigError for invalid labels, which would fail as an IndexError in each replica."""
        name, classes = self._config.data.dataset, self._splits.classes
        if labels.dim() != 1 or labels.is_floating_point():
            raise ConfigError(f"{name}: labels must be integers, one per image")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ConfigError(
                f"{name}: found label {low if low < 0 else high}, but labels of {classes} classes are 0 to "
                f"{classes - 1}; your own data set returns (train, test, number of classes)"
            )

    def _resized(self, images: torch.Tensor, size: int) -> torch.Tensor:
        if images.dtype != torch.uint8:
            name = self._config.data.dataset
            raise ConfigError(f"--image-size {size} needs uint8 images, but those of {name} are {images.dtype}")
        return torch.from_numpy(resize(images.numpy(), (size, size)))


def _is_image(image: Any) -> bool:
    """Whether the pixels of a tensor or array are of a type that `to_device_format` converts to those of a network."""
    name = str(image.dtype).rpartition(".")[2]
    return name in ("uint8", "bool") or "float" in name


def input_shape(config: Config, sent: torch.Tensor) -> Tuple[int, int]:
    """Return (channels, height) of the network's input. Images of the user that seem to be [H, W, C] are a warning.

    Args:
        sent: images as the host sends them.

    Raises:
        ConfigError: a vision transformer's images are not square.
    """
    channels, height, width = sent.shape[1:]
    name = config.data.dataset
    if ":" in name and width in _CHANNELS and channels not in _CHANNELS:
        shape = [channels, height, width]
        warnings.warn(f"{name}: images of shape {shape} are taken as [channels, height, width]", stacklevel=2)
    if config.data.image_size is None and height != width and config.training.model in VISION_TRANSFORMERS:
        raise ConfigError(f"{config.training.model} needs square images, not {height}x{width}: add --resize {height}")
    return channels, config.data.image_size or height


def _host_size(splits: Splits, eight_bit_io: bool, size: Optional[int]) -> Optional[int]:
    """Return the size to resize to on the host; None if the host does not resize.

    With 8-bit IO arrays are enlarged on the device instead.
    """
    is_enlarged = (
        size is not None and isinstance(splits.train, ArrayDataset) and size >= max(splits.train.images.shape[2:])
    )
    return None if eight_bit_io and is_enlarged else size
