"""The collectives that return a handle at once, and what to do with a handle (contract section 8).

`name` tells operations apart: those of one name belong together on all ranks, in whatever order the ranks ask for them;
unnamed ones are numbered. Tensors must stay unchanged until `synchronize`. Errors: `_submission`.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Optional, Sequence

import torch

from horovod.torch import _submission as submission
from horovod.torch._operations import Barrier, Join
from horovod.torch._process_sets import check, global_process_set
from horovod.torch._reduction import ReduceOp
from horovod.torch._submission import synchronize, the_only

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def allreduce_async(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """`allreduce` in the background."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return submission.allreduce("allreduce", name, how, [tensor], [torch.empty_like(tensor)], the_only)


def allreduce_async_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """`allreduce_` in the background."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return submission.allreduce("allreduce", name, how, [tensor], [tensor], the_only)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """`grouped_allreduce` in the background; `synchronize` returns a tuple."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return submission.allreduce("grouped_allreduce", name, how, tensors, outputs)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> int:
    """`grouped_allreduce_` in the background; `synchronize` returns a tuple."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return submission.allreduce("grouped_allreduce", name, how, tensors, tensors)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: Any = global_process_set
) -> Callable[[], torch.Tensor]:
    """Refused with NotImplementedError."""
    raise NotImplementedError(
        "the emulated Horovod does not reduce sparse tensors; use DistributedOptimizer(sparse_as_dense=True)"
    )


def allgather_async(tensor: torch.Tensor, name: Optional[str] = None, process_set: Any = global_process_set) -> int:
    """`allgather` in the background."""
    return submission.allgather("allgather", name, process_set, [tensor], the_only)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: Optional[str] = None, process_set: Any = global_process_set
) -> int:
    """`grouped_allgather` in the background; `synchronize` returns a tuple."""
    return submission.allgather("grouped_allgather", name, process_set, tensors)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> int:
    """`broadcast` in the background."""
    return submission.broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> int:
    """`broadcast_` in the background."""
    return submission.broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None, process_set: Any = global_process_set
) -> int:
    """`alltoall` in the background; `synchronize` returns the tensor and the splits received."""
    return submission.alltoall(tensor, splits, name, process_set)


def reducescatter_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`reducescatter` in the background."""
    how = op, prescale_factor, postscale_factor, process_set
    return submission.reducescatter("reducescatter", name, how, [tensor], the_only)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """`grouped_reducescatter` in the background; `synchronize` returns a tuple."""
    how = op, prescale_factor, postscale_factor, process_set
    return submission.reducescatter("grouped_reducescatter", name, how, tensors)


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and waits for the others to say so; returns the rank that was last.

    Until then it contributes zeros to the others' allreduces; their other collectives fail. `device` is not used.
    """
    return int(synchronize(submission.submit("join", None, lambda key: Join())))


def barrier(process_set: Any = global_process_set) -> None:
    """Returns when all ranks have called it."""
    check(process_set)
    synchronize(submission.submit("barrier", None, lambda key: Barrier()))


def chosen_op(op: Optional[int], average: Optional[bool]) -> int:
    """The reduction that is meant; ValueError for both arguments."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is None:
        return Average if op is None else op
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Average if average else Sum
