"""A user's data set and model that are slow while a file exists in the working directory, for tests of preemptions.

The file names what is slow. A process that gets there writes the file `in-NAME`, so that a test knows when to send a
signal. `blocked-call` never returns, and executes no Python code: no signal handler runs either.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any, Tuple

import torch
from torch import nn

LONG_S = 120.0
_MUTEX_BYTES = 64  # at least sizeof(pthread_mutex_t)


def _is(name: str) -> bool:
    if not Path(name).exists():
        return False
    Path(f"in-{name}").touch()
    return True


def _block() -> None:
    """Lock a mutex twice: the second call never returns, and releases the interpreter's lock."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(_MUTEX_BYTES)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def _slow_down_the_disk() -> None:
    flush = os.fsync

    def slow_flush(descriptor: int) -> None:
        if _is("slow-disk"):
            time.sleep(LONG_S)
        flush(descriptor)

    os.fsync = slow_flush  # type: ignore[assignment]


class Data:
    """Images that are functions of their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        if _is("slow-data"):
            time.sleep(LONG_S)
        return torch.full((1, 8, 8), float(index % 17)) + torch.arange(8.0), index % 10


def data(folder: Any) -> Any:
    """Return the data set, for --dataset."""
    if _is("slow-start"):
        time.sleep(LONG_S)
    _slow_down_the_disk()
    return Data(640), Data(64), 10


class Model(nn.Module):
    """A linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training and _is("slow-evaluation"):
            time.sleep(1.0)  # a single call: 64 samples are several
        if self.training and _is("slow-call"):
            time.sleep(LONG_S)
        if self.training and _is("blocked-call"):
            _block()
        if self.training and Path("steady").exists():
            time.sleep(0.05)
        logits: torch.Tensor = self.head(images.flatten(1))
        return logits


def model(channels: int, classes: int) -> nn.Module:
    """Return the model, for --model."""
    return Model(channels, classes)
