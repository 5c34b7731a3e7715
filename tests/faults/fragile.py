"""A data set and a model of a user's own that fail when a file tells them to, once for each file.

The files lie in the working directory; each is named for what happens, and is taken away by whom it happens to: the
process whose first replica is number 2. A file `again` lets them all stay. With a file `slow-disk` every flush to the
disk takes its time, in all processes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Tuple

import torch
from torch import nn

LONG_S = 600.0
SLOW_FLUSH_S = 0.15


def _is_told(what: str) -> bool:
    if os.environ.get("POPDIST_REPLICA_INDEX_OFFSET") != "2":
        return False
    is_there = Path(what).exists()
    if is_there and not Path("again").exists():
        Path(what).unlink()
    return is_there


def _hang_in_user_code() -> None:
    time.sleep(LONG_S)


class Data:
    """Images that follow from their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        if _is_told("loader-raises"):
            raise OSError("the disk is gone")
        if _is_told("loader-hangs"):
            _hang_in_user_code()
        return torch.full((1, 8, 8), float(index % 17)) + torch.arange(8.0), index % 10


def _slow_down_the_disk() -> None:
    flush = os.fsync

    def slow_flush(descriptor: int) -> None:
        time.sleep(SLOW_FLUSH_S)
        flush(descriptor)

    os.fsync = slow_flush  # type: ignore[assignment]


def data(folder: Any) -> Any:
    """For --dataset."""
    if Path("slow-disk").exists():
        _slow_down_the_disk()
    return Data(640), Data(16), 10


class Model(nn.Module):
    """A batch normalisation and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if _is_told("model-raises"):
            raise ValueError("no such layer")
        if _is_told("model-exhausts-memory"):
            torch.empty(1 << 60, dtype=torch.uint8)
        if _is_told("model-hangs"):
            _hang_in_user_code()
        logits: torch.Tensor = self.head(self.norm(images).flatten(1))
        return logits


def model(channels: int, classes: int) -> nn.Module:
    """For --model."""
    return Model(channels, classes)
