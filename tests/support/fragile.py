"""A user's data set and model that fail if a file exists in the working directory, once for each file.

The name of a file is the failure. The process whose first replica is number 2 fails, and removes the file. The failures
`raises-at-INDEX` are of the processes that load these samples, all at the same time, and `outage` is of all until
someone removes the file. With a file `slow-disk` every flush of instance 0 to the disk is slow, with `slow-data` the
data of instances of two replicas.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any, Tuple

import torch
from poptorch.optimizers.device_optimizer import DeviceOptimizer
from torch import nn

from tests.support.bounded import wait_until

LONG_S = 600.0
SLOW_FLUSH_S = 0.15
SLOW_SAMPLE_S = 0.03
UPDATE_S = 1.0  # longer than an update takes


def _must_fail(failure: str) -> bool:
    return os.environ.get("POPDIST_REPLICA_INDEX_OFFSET") == "2" and _takes(failure)


def _takes(failure: str) -> bool:
    try:  # both replicas of the instance can get here at the same time; only one of them fails
        Path(failure).unlink()
    except FileNotFoundError:
        return False
    return True


def _hang_in_user_code() -> None:
    time.sleep(LONG_S)


def _loop_in_user_code() -> None:
    while True:
        pass


def _throw() -> None:
    # std::__throw_runtime_error(char const*): no frame of this process catches the exception.
    ctypes.CDLL("libstdc++.so.6")["_ZSt21__throw_runtime_errorPKc"](b"the device is gone")


def _die_once_the_others_are_done(*arguments: Any) -> None:
    """End this process in its optimizer step, when the others have its gradients and complete the update."""
    time.sleep(UPDATE_S)
    os.kill(os.getpid(), signal.SIGKILL)


class Data:
    """Images that are functions of their index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, int]:
        if _must_fail("loader-hangs"):
            _hang_in_user_code()
        if _takes(f"raises-at-{index}"):
            wait_until(lambda: not list(Path().glob("raises-at-*")))  # until the others load such a sample, too
            raise ValueError("no such sample")
        if Path("outage").exists():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        if os.environ.get("POPDIST_NUM_LOCAL_REPLICAS") == "2" and Path("slow-data").exists():
            time.sleep(SLOW_SAMPLE_S)
        return torch.full((1, 8, 8), float(index % 17)) + torch.arange(8.0), index % 10


def _slow_down_the_disk() -> None:
    flush = os.fsync

    def slow_flush(descriptor: int) -> None:
        if Path("slow-disk").exists():
            time.sleep(SLOW_FLUSH_S)
        flush(descriptor)

    os.fsync = slow_flush  # type: ignore[assignment]


def data(folder: Any) -> Any:
    """Return the data set, for --dataset."""
    if os.environ.get("POPDIST_REPLICA_INDEX_OFFSET") == "0" and Path("slow-disk").exists():
        _slow_down_the_disk()
    return Data(640), Data(16), 10


class Model(nn.Module):
    """A batch normalization, random zeros and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(channels), nn.Dropout(0.1)
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if _must_fail("model-raises"):
            raise ValueError("no such layer")
        if _must_fail("model-throws"):
            _throw()
        if _must_fail("model-loops"):
            _loop_in_user_code()
        if _must_fail("optimizer-dies"):
            DeviceOptimizer.step = _die_once_the_others_are_done  # type: ignore[method-assign]
        logits: torch.Tensor = self.head(self.dropout(self.norm(images).flatten(1)))
        return logits


def model(channels: int, classes: int) -> nn.Module:
    """Return the model, for --model."""
    return Model(channels, classes)
