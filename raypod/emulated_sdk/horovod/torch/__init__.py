"""`horovod.torch`, emulated: what PopTorch programs use of Horovod 0.28 on the host (contract section 8).

Gradients never pass here. Ranks are instances, not replicas. All ranks call in the same order; a rank that calls
something else, ends or stays silent makes the others raise RuntimeError. Results carry no autograd history.
"""

from __future__ import annotations

from .compression import Compression
from .functions import broadcast_object, broadcast_parameters
from .mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    cross_rank,
    cross_size,
    global_process_set,
    grouped_allreduce,
    grouped_allreduce_,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
