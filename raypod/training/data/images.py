"""Images and labels as batches: checked, augmented, mixed, resized, normalized and cast, on the host or the device.

As in Graphcore's CNN application. Mixup (Zhang et al. 2018) adds to each image the one before it in its micro-batch;
cutmix (Yun et al. 2019) pastes a rectangle of another one, with mixup of the one before that. The random numbers of a
pair are a function of (seed, epoch, sample, partner), so the mixture is the same for every placement.
"""

from __future__ import annotations

import warnings
from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan.config import VISION_TRANSFORMERS, Config, DataSection
from raypod.training.data.arrays import ArrayDataset, Splits
from raypod.training.data.order import pair_fractions
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
        dtype = str(image.dtype).rpartition(".")[2]
        if dtype not in ("uint8", "bool") and "float" not in dtype:
            raise ConfigError(
                f"{dataset}: images must be uint8, which are divided by 255, or floating-point numbers, which are used "
                f"as they are, not {dtype}{of}; convert them in your data set"
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
            if images.dtype != torch.uint8:
                raise ConfigError(
                    f"--image-size {size} needs uint8 images, but those of {data.dataset} are {images.dtype}"
                )
            images = torch.from_numpy(resize(images.numpy(), (size, size)))
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


_LEVELS = 2048  # coefficients are multiples of its inverse, which half represents exactly from 0.5 to 1
_MIXUP_DRAW, _CUTMIX_DRAW = 0, 1  # of the random numbers of a pair: the first one of each
_BETA_DRAWS, _BOX_DRAWS = 2, 4  # per attempt, and per pair
_ATTEMPT = 16  # draws between two attempts
_BOX = 5  # columns: first row, end of the rows, first column, end of the columns, share of the pixels


class Mixed(Tuple[torch.Tensor, torch.Tensor]):
    """Images [n, channels, height, width] and the words of their pairs, as the first input of a network."""


def cutmix_shift(data: DataSection) -> int:
    """Return the distance in the micro-batch between an image and the one that cutmix pastes from."""
    return 2 if data.mixup_alpha else 1


def pair_words(
    data: DataSection, samples: np.ndarray, micro_batch: int, seed_and_epoch: Tuple[int, int], size: Tuple[int, int]
) -> Optional[np.ndarray]:
    """Return what the device needs to mix the images of a call: float32 [len(samples), columns].

    The columns are the coefficient of mixup, if there is mixup, and the box of cutmix, if there is cutmix.

    Args:
        samples: indices in the order of the batch, whose micro-batches follow each other; int64.
        size: height and width of the images that are mixed.

    Returns:
        None: the section has neither.
    """
    by_batch, columns = samples.reshape(-1, micro_batch), []

    def partners(shift: int) -> np.ndarray:
        return np.roll(by_batch, shift, axis=1).reshape(-1)

    if data.mixup_alpha:
        columns.append(_coefficients(data.mixup_alpha, samples, partners(1), seed_and_epoch)[:, None])
    if data.has_cutmix:
        fractions = pair_fractions(seed_and_epoch, samples, partners(cutmix_shift(data)), _CUTMIX_DRAW, _BOX_DRAWS)
        columns.append(_boxes(data, fractions, size))
    return np.concatenate(columns, axis=1, dtype=np.float32) if columns else None


def _coefficients(
    alpha: float, samples: np.ndarray, partners: np.ndarray, seed_and_epoch: Tuple[int, int]
) -> np.ndarray:
    """Return the larger of x and 1 - x for x of the distribution Beta(alpha, alpha): float64 [len(samples)].

    By Joehnk's method (1964): u^(1/alpha) / (u^(1/alpha) + v^(1/alpha)) for uniform u and v with a denominator of at
    most 1; in logarithms, as the powers of a small alpha are below the smallest number.
    """
    found = np.zeros(len(samples))
    missing = np.arange(len(samples))
    attempt = 0
    while len(missing):
        draw = _MIXUP_DRAW + attempt * _ATTEMPT
        fractions = pair_fractions(seed_and_epoch, samples[missing], partners[missing], draw, _BETA_DRAWS)
        first, second = np.log(fractions.T) / alpha
        is_accepted = np.logaddexp(first, second) <= 0
        found[missing[is_accepted]] = 1 / (1 + np.exp(-np.abs(first - second)[is_accepted]))
        missing, attempt = missing[~is_accepted], attempt + 1
    return np.rint(found * _LEVELS) / _LEVELS


def _boxes(data: DataSection, fractions: np.ndarray, size: Tuple[int, int]) -> np.ndarray:
    """Return the boxes of cutmix, float64 [len(fractions), 5]; an empty one is at 0.

    Args:
        fractions: random numbers in (0, 1), float64 [samples, 4].
    """
    low, high = data.cutmix_lambda_low, data.cutmix_lambda_high
    is_cut = fractions[:, 0] >= data.cutmix_disable_prob
    side = np.sqrt(1 - (low + (high - low) * fractions[:, 1])) * is_cut  # of the box, as a fraction of the image's
    boxes = np.zeros((len(fractions), _BOX))
    for axis, length in enumerate(size):
        first = (1 - side) * length * fractions[:, 2 + axis]
        boxes[:, 2 * axis], boxes[:, 2 * axis + 1] = np.rint(first), np.rint(first + side * length)
    boxes[:, -1] = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (size[0] * size[1])
    boxes[boxes[:, -1] == 0] = 0
    return boxes


class Mixing(nn.Module):
    """The input of a network on the device: `prepare`, then the mixture of a training batch.

    Args:
        data: the section of the config.
        prepare: maps the images of the host to those of the network.
    """

    def __init__(self, data: DataSection, prepare: nn.Module) -> None:
        super().__init__()
        self.prepare, self._data = prepare, data

    def forward(self, inputs: Any) -> torch.Tensor:
        """Map images, or `Mixed` of them and the words of `pair_words`, to images [n, channels, height, width]."""
        images: torch.Tensor = self.prepare(inputs[0] if isinstance(inputs, Mixed) else inputs)
        if not isinstance(inputs, Mixed):
            return images
        words = inputs[1]
        if self._data.mixup_alpha:
            kept = words[:, :1].to(images.dtype)[:, :, None, None]
            images = images * kept + _before(images, 1) * (1 - kept)
        if self._data.has_cutmix:
            box = words[:, -_BOX:]
            rows = _is_between(box[:, 0:1], box[:, 1:2], images.shape[2])[:, None, :, None]
            columns = _is_between(box[:, 2:3], box[:, 3:4], images.shape[3])[:, None, None, :]
            images = torch.where(rows & columns, _before(images, cutmix_shift(self._data)), images)
        return images


def weighted_labels(
    data: DataSection, labels: torch.Tensor, words: torch.Tensor
) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Return the labels of the images in a mixture, each with its share of the mixture: float32 [n]."""
    if not data.mixup_alpha:
        pasted = words[:, -1]
        return [(labels, 1 - pasted), (_before(labels, 1), pasted)]
    kept = words[:, 0]
    mixed = [(labels, kept), (_before(labels, 1), 1 - kept)]
    if not data.has_cutmix:
        return mixed
    pasted, shift = words[:, -1], cutmix_shift(data)
    below = [(each, share * (1 - pasted)) for each, share in mixed]
    return below + [(_before(each, shift), _before(share, shift) * pasted) for each, share in mixed]


def _before(values: torch.Tensor, shift: int) -> torch.Tensor:
    """Return for each sample the value of the one `shift` places before it in the micro-batch."""
    return torch.roll(values, shifts=shift, dims=0)


def _is_between(first: torch.Tensor, end: torch.Tensor, length: int) -> torch.Tensor:
    """Return which of the places 0 to length - 1 are in [first, end), float32 [n, 1]: bool [n, length]."""
    places = torch.arange(length, dtype=torch.float32, device=first.device)[None]
    return (places >= first) & (places < end)
