"""Map-style data sets of image files that are decoded on each access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Tuple

import numpy as np
from typing_extensions import Protocol

if TYPE_CHECKING:  # imports torchvision, which planning and the prediction of other data sets do not need
    from raypod.datasets.image_decoders import Preparation


class Files(Protocol):
    """The files of a split, by the index of the sample."""

    def read(self, index: int) -> bytes:
        """Return the content of a file. OSError if it cannot be read."""

    def name(self, index: int) -> str:
        """Return where the file is, for messages."""


class FolderFiles:
    """Files in a folder.

    Args:
        names: bytes [samples], paths relative to `root`.
    """

    def __init__(self, root: Path, names: np.ndarray) -> None:
        self._root, self._names = str(root), names

    def read(self, index: int) -> bytes:
        """See `Files.read`."""
        with open(self.name(index), "rb", buffering=0) as file:  # noqa: PTH123 - faster than pathlib
            return file.read()

    def name(self, index: int) -> str:
        """See `Files.name`."""
        return os.path.join(self._root, os.fsdecode(bytes(self._names[index])))  # noqa: PTH118 - as above


class ImageFiles:
    """A map-style data set that decodes an image on each access.

    Args:
        files: the files.
        labels: int64 [samples].
        transform: makes a sample, uint8 [3, side, side], of a file or of a Pillow image.
    """

    draws_from_torch_only = True  # see `SeededSamples`

    def __init__(self, files: Files, labels: np.ndarray, transform: Preparation) -> None:
        self.files, self._labels, self.transform = files, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Tuple[Any, int]:
        """Return (image, label).

        Raises:
            OSError: the image cannot be read; the message has its path.
        """
        try:
            return self.transform.decode(self.files.read(index)), int(self._labels[index])
        except Exception as error:  # decoders raise many exception types for damaged files
            raise OSError(
                f"cannot read the image {self.files.name(index)}: {error}; replace it, or remove it"
            ) from error
