"""A user's data set and model for tests of preemptions: a process gets a signal at a place of its run, or stays there.

A file `at-PLACE` in the working directory, which names the number of a signal or is empty, has an effect once; the
process that gets there writes the file `in-PLACE`. `blocked-call` never returns, and executes no Python code: no signal
handler runs either. All places but `start` and `evaluation` are reached once the run has a checkpoint.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from pathlib import Path
from typing import Any, Tuple

import torch
from torch import nn

LONG_S = 120.0
_CHECKPOINTS = Path("run", "checkpoints")
_REPLICAS = 2
_BLOCKED_FROM = 1 + 6 * _REPLICAS  # call, after the one that compiles: the checkpoint of update 5 lacks update 6
_MUTEX_BYTES = 64  # at least sizeof(pthread_mutex_t)
_calls = itertools.count()  # of the model in training; not its attribute, which the compilation resets


def _is_at(place: str) -> bool:
    file = Path(f"at-{place}")
    try:
        number = file.read_text()
        file.unlink()
    except FileNotFoundError:
        return False
    Path(f"in-{place}").touch()
    if number:
        os.kill(os.getpid(), int(number))
    return True


def _has_checkpoint() -> bool:
    return (_CHECKPOINTS / "LATEST").exists()


def _block() -> None:
    """Lock a mutex twice: the second call never returns, and releases the interpreter's lock."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(_MUTEX_BYTES)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def _flush(descriptor: int, flush: Any = os.fsync) -> None:
    is_writing = _has_checkpoint() and any(path.suffix for path in _CHECKPOINTS.iterdir())
    if is_writing and _is_at("disk"):
        time.sleep(LONG_S)
    flush(descriptor)


class Data:
    """Images that are functions of their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        if _has_checkpoint() and _is_at("data"):
            time.sleep(LONG_S)
            Path("waited").touch()
        return torch.full((1, 8, 8), float(index % 17)) + torch.arange(8.0), index % 10


def data(folder: Any) -> Any:
    """Return the data set, for --dataset."""
    _is_at("start")
    if Path("at-disk").exists():
        os.fsync = _flush  # type: ignore[assignment]
    return Data(640), Data(64), 10


class Model(nn.Module):
    """A linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            _is_at("evaluation")
        elif next(_calls) >= _BLOCKED_FROM and Path("at-blocked-call").exists():
            while not _has_checkpoint():  # it is still being written
                time.sleep(0.01)
            if _is_at("blocked-call"):
                _block()
        elif _has_checkpoint():
            _is_at("call")
        if self.training and Path("steady").exists():
            time.sleep(0.05)
        logits: torch.Tensor = self.head(images.flatten(1))
        return logits


def model(channels: int, classes: int) -> nn.Module:
    """Return the model, for --model."""
    return Model(channels, classes)
