"""`horovod.torch.mpi_ops`: the collective functions of Horovod 0.28, its build, and everything of `_basics`."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _basics
from horovod.torch._basics import *  # noqa: F403  # every name of its __all__
from horovod.torch._basics import is_homogeneous as is_homogeneous  # not a name of horovod.torch, as in Horovod
from horovod.torch._collectives import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
    collective_function,
    sparse_allreduce_async,
)
from horovod.torch._engine import poll, submit, synchronize
from horovod.torch._operations import Barrier, Join, ReduceOp, checked_integer
from horovod.torch._process_sets import ProcessSet, engine_of, global_process_set

__all__ = [
    *_basics.__all__,
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

_Function = Callable[..., torch.Tensor]
_Grouped = Callable[..., List[torch.Tensor]]
_InPlaceGroup = Callable[..., Tuple[torch.Tensor, ...]]
_Async = Callable[..., int]

allreduce: _Function = collective_function(Allreduce)
allreduce_: _Function = collective_function(Allreduce, in_place=True)
allreduce_async: _Async = collective_function(Allreduce, asynchronous=True)
allreduce_async_: _Async = collective_function(Allreduce, in_place=True, asynchronous=True)
grouped_allreduce: _Grouped = collective_function(Allreduce, grouped=True)
grouped_allreduce_: _InPlaceGroup = collective_function(Allreduce, grouped=True, in_place=True)
grouped_allreduce_async: _Async = collective_function(Allreduce, grouped=True, asynchronous=True)
grouped_allreduce_async_: _Async = collective_function(Allreduce, grouped=True, in_place=True, asynchronous=True)
allgather: _Function = collective_function(Allgather)
allgather_async: _Async = collective_function(Allgather, asynchronous=True)
grouped_allgather: _InPlaceGroup = collective_function(Allgather, grouped=True)
grouped_allgather_async: _Async = collective_function(Allgather, grouped=True, asynchronous=True)
broadcast: _Function = collective_function(Broadcast)
broadcast_: _Function = collective_function(Broadcast, in_place=True)
broadcast_async: _Async = collective_function(Broadcast, asynchronous=True)
broadcast_async_: _Async = collective_function(Broadcast, in_place=True, asynchronous=True)
alltoall: Callable[..., Any] = collective_function(Alltoall)
alltoall_async: _Async = collective_function(Alltoall, asynchronous=True)
reducescatter: _Function = collective_function(Reducescatter)
reducescatter_async: _Async = collective_function(Reducescatter, asynchronous=True)
grouped_reducescatter: _Grouped = collective_function(Reducescatter, grouped=True)
grouped_reducescatter_async: _Async = collective_function(Reducescatter, grouped=True, asynchronous=True)


def join(device: int = -1) -> int:
    """Report that this rank has no more data, wait until all ranks have, and return the last rank to join.

    Until then this rank contributes zeros to the others' allreduces; their other collectives fail. `device` is an
    integer and has no effect: TypeError otherwise.
    """
    checked_integer(device, "device")
    return int(synchronize(submit(engine_of(global_process_set, "join"), "join", None, lambda key: Join())))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    synchronize(submit(engine_of(process_set, "barrier"), "barrier", None, lambda key: Barrier("barrier")))


def mpi_built() -> bool:
    """Return False."""
    return False


def mpi_enabled() -> bool:
    """Return False."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError, as Horovod does without MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def gloo_built() -> bool:
    """Return True: the emulated collectives use Gloo."""
    return True


def gloo_enabled() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return 0: there is no NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
