"""`horovod.torch`, emulated: what PyTorch programs use of Horovod 0.28 on the host.

Ranks are instances, not replicas: the device reduces the gradients of IPU programs, without Horovod. Operations are
matched by name, in whatever order the ranks submit them. If the ranks disagree, or a rank is lost or does not respond,
all ranks raise an error.
"""

from __future__ import annotations

from typing import Any

from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import *  # noqa: F403  # every name of its __all__
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        raise AttributeError("the emulated Horovod has no elastic mode")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
