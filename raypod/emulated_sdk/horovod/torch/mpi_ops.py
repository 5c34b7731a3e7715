"""`horovod.torch.mpi_ops`: all but optimizers and objects, with Horovod 0.28's signatures (contract section 8)."""

from __future__ import annotations

import atexit
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _engine, _identity
from horovod.torch._asynchronous import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    reducescatter_async,
    sparse_allreduce_async,
)
from horovod.torch._identity import cross_rank, cross_size, is_homogeneous, local_rank, local_size, rank, size
from horovod.torch._process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.torch._queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from horovod.torch._submission import poll, synchronize
from horovod.torch._synchronous import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Joins all other ranks; without effect if done before. All ranks must call it.

    NotImplementedError for a part of the ranks (`comm`, `process_sets`), RuntimeError for garbage in the environment or
    if a rank does not come in time, which the error names.
    """
    if comm or (process_sets and process_sets != "dynamic"):
        raise NotImplementedError("the emulated Horovod works on all ranks only: leave out comm and process_sets")
    _identity.find()
    _engine.start(_identity.group())


def shutdown() -> None:
    """Leaves the others, whose further collectives fail. `init` may be called again."""
    _engine.stop()
    _identity.forget()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _identity.is_known()


atexit.register(shutdown)  # later than the wires' own closing, so it runs before that

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
