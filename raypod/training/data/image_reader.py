"""Read image files as the test samples of a data set: its number of channels, its size, its transform."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Sequence

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import MAX_IMAGE_PIXELS
from raypod.training.data.arrays import Splits
from raypod.training.data.image_files import KINDS, ImageFiles, ImageWalk
from raypod.training.data.pixels import eight_bit, open_image
from raypod.training.data.transforms import resize

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by the number of channels


def image_files(names: Sequence[str]) -> List[Path]:
    """Return the named files, and the images in the named folders in the order of their names.

    Raises:
        ConfigError: a name does not exist, or a folder contains no image or cannot be read.
    """
    found: List[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            try:
                inside = sorted(map(Path, ImageWalk().images(str(path))))
            except OSError as error:
                raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}") from None
            if not inside:
                raise ConfigError(f"{name} contains no images ({KINDS})")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ConfigError(f"{name}: there is no such image or folder")
    return found


class ImageReader:
    """Prepares image files for a model.

    Test splits with the attribute `transform`, as those of torchvision, transform the Pillow image themselves. Other
    images are resized to the size of the samples.
    """

    def __init__(self, dataset: str, splits: Splits, max_pixels: int = MAX_IMAGE_PIXELS) -> None:
        """`dataset` is the name of the data set, for messages; `max_pixels` the limit of an image.

        Raises:
            ConfigError: its samples are no images from which the preparation of others follows.
        """
        split: Any = splits.test if len(splits.test) else splits.train
        name = "test" if len(splits.test) else "training"
        with user_code.reported(f"{name} sample 0 of {dataset}"):
            sample = torch.as_tensor(split[0][0])
        channels, self._height, self._width = sample.shape
        self._transform = getattr(split, "transform", None)
        self._decode = split.transform.decode if isinstance(split, ImageFiles) else None
        if channels not in _MODES:
            raise ConfigError(f"{dataset}: the model gets images of {channels} channels, which image files do not have")
        if self._transform is None and sample.dtype != torch.uint8:
            raise ConfigError(
                f"{dataset}: its samples are {sample.dtype}, and how it computes them is unknown: give its test split "
                "the attribute transform, which maps a Pillow image to a tensor"
            )
        self._max_pixels = max_pixels
        self._mode, self._shape = _MODES[channels], tuple(sample.shape)

    def read(self, path: Path) -> torch.Tensor:
        """Return an image [channels, height, width] as a sample of the data set. ConfigError if it cannot be read."""
        try:
            if self._decode is not None:
                return self._decode(path.read_bytes())
            with open_image(path, self._max_pixels) as file:
                image = eight_bit(file, self._mode)
                if self._transform is not None:
                    return torch.as_tensor(self._transform(image))
        except Exception as error:  # noqa: BLE001 - Pillow and the user's transform raise many exception types
            raise ConfigError(f"cannot read the image {path}: {' '.join(str(error).split())}") from None
        pixels = np.array(image, dtype=np.uint8).reshape(image.height, image.width, self._shape[0])
        channels_first = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])
        return torch.from_numpy(resize(channels_first, (self._height, self._width)))[0]
