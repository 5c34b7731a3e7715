"""Text files as packed windows of tokens; without files, the source text of Python's standard library."""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Optional, Tuple

import numpy as np
import torch

from raypod.datasets.arrays import fingerprint_of_bytes
from raypod.datasets.source import Batch, Source
from raypod.errors import ConfigError, DataMissing

_END = 0  # the byte after each file
_HELD_OUT = 20  # one file of so many, chosen by its name
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "ensurepip"}


@dataclasses.dataclass(frozen=True)
class Windows:
    """Consecutive windows of a text: window i holds the tokens from i * length to (i + 1) * length, inclusive.

    Args:
        tokens: uint8 or int32 [tokens].
        length: tokens that a window predicts; it holds one more.
    """

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)


class TextSource(Source):
    """The windows of the training and the held-out files. A batch is (tokens int32 [n, length + 1],)."""

    is_in_memory = True

    def __init__(self, train: Windows, test: Windows) -> None:
        self.train, self.test = train, test
        self.fingerprint = fingerprint_of_bytes(train.tokens, test.tokens)

    def gather(self, split: Any, samples: np.ndarray, seed_and_epoch: Optional[Tuple[int, int]]) -> Batch:
        """See `Source.gather`."""
        positions = samples[:, None] * split.length + np.arange(split.length + 1)
        return self.to_device_format(split.tokens[positions])

    def to_device_format(self, batch: Any) -> Batch:
        """See `Source.to_device_format`."""
        return (torch.from_numpy(batch.astype(np.int32)),)


def files_of(path: Optional[str]) -> List[Path]:
    """Return the text files of a file or folder, in the order of their names; None: the standard library's.

    Raises:
        DataMissing: there is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path).expanduser()
    if root.is_file():
        return [root]
    suffixes = {".py"} if path is None else {".txt", ".md", ".rst", ".py"}
    found = [each for each in sorted(root.rglob("*")) if each.suffix in suffixes and each.is_file()]
    if path is None:
        found = [each for each in found if not _SKIPPED & set(each.relative_to(root).parts)]
    if not found:
        raise DataMissing(f"{root} has no text files ({', '.join(sorted(suffixes))})")
    return found


def split_files(files: Iterable[Path], root: Path) -> Iterator[Tuple[Path, bool]]:
    """Yield (file, whether it is held out). The choice depends on the file's name alone."""
    for file in files:
        name = str(file.relative_to(root)) if root in file.parents else file.name
        yield file, zlib.crc32(name.encode()) % _HELD_OUT == 0


def read_bytes(files: Iterable[Path]) -> np.ndarray:
    """Return the content of the files, each with a byte 0 at its end: uint8."""
    return np.frombuffer(b"".join(file.read_bytes() + bytes([_END]) for file in files), dtype=np.uint8)


def check_length(windows: Windows, name: str) -> None:
    """Raise ConfigError if a split is shorter than a window."""
    if not len(windows):
        raise ConfigError(
            f"the {name} text has {len(windows.tokens)} tokens, less than a window of {windows.length + 1}: use a "
            "smaller --sequence-length or more text"
        )
