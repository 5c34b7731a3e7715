"""The collectives that wait for their result; gradients pass through those that are not in place (section 8)."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch

from horovod.torch import _asynchronous as asynchronous
from horovod.torch import _identity
from horovod.torch import _submission as submission
from horovod.torch._asynchronous import Average, Sum, chosen_op
from horovod.torch._process_sets import global_process_set
from horovod.torch._submission import How, synchronize
from horovod.torch.compression import Compression


class _Allreduce(torch.autograd.Function):
    """The gradients are combined as the values were."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: Optional[str], how: How, *tensors: torch.Tensor) -> Any:
        ctx.kind, ctx.how = kind, how
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return synchronize(submission.allreduce(kind, name, how, tensors, outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, None, None, *_apply(_Allreduce, ctx.kind, None, ctx.how, *_dense(gradients)))


class _Allgather(torch.autograd.Function):
    """Each rank gets the mean over the ranks of the gradients of its own rows."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: Optional[str], process_set: Any, *tensors: torch.Tensor) -> Any:
        if not all(tensor.dim() for tensor in tensors):
            raise IndexError(f"{kind} joins tensors along their first dimension; a 0-d tensor has none: use reshape(1)")
        ctx.lengths = [tensor.shape[0] for tensor in tensors]
        return synchronize(submission.allgather(kind, name, process_set, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        means = grouped_allreduce(_dense(gradients))
        before = allgather(torch.tensor([ctx.lengths]))[: _identity.rank()].sum(dim=0).tolist()
        return (None, None, None, *(mean.narrow(0, *rows) for mean, *rows in zip(means, before, ctx.lengths)))


class _Broadcast(torch.autograd.Function):
    """Root gets the mean of all ranks' gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: Optional[str], process_set: Any) -> Any:
        ctx.root_rank = root_rank
        return synchronize(asynchronous.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mean = allreduce(gradients[0].contiguous())
        return mean if _identity.rank() == ctx.root_rank else torch.zeros_like(mean), None, None, None


class _Alltoall(torch.autograd.Function):
    """The gradients travel back; rows that were sent nowhere get zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: Optional[str], process_set: Any) -> Any:
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        result, ctx.received = synchronize(asynchronous.alltoall_async(tensor, splits, name, process_set))
        ctx.mark_non_differentiable(ctx.received)
        return result, ctx.received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = synchronize(asynchronous.alltoall_async(gradients[0].contiguous(), ctx.received))
        unsent = returned.new_zeros(ctx.rows - returned.shape[0], *returned.shape[1:])
        return torch.cat([returned, unsent]), None, None, None


class _Reducescatter(torch.autograd.Function):
    """Every rank gets all ranks' gradients, times what the values were multiplied by."""

    @staticmethod
    def forward(ctx: Any, kind: str, name: Optional[str], how: How, *tensors: torch.Tensor) -> Any:
        ctx.factor = how[1] * how[2] * (_identity.size() if how[0] == Sum else 1)
        return synchronize(submission.reducescatter(kind, name, how, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = [gradient * ctx.factor for gradient in _dense(gradients)]
        return (None, None, None, *grouped_allgather(scaled))


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """Everyone's tensors, of one shape and dtype, combined by `op` (default Average); the same bits on all ranks.

    Any number of dimensions, contiguous; int32, int64, float16, float32 or float64. The Average of integers is rounded
    towards zero. The factors multiply before and after.
    """
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed(_Allreduce, [tensor], compression, "allreduce", name, how)[0]


def allreduce_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place; returns the tensor."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    synchronize(submission.allreduce("allreduce", name, how, [tensor], [tensor]))
    return tensor


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> List[torch.Tensor]:
    """`allreduce` of several tensors of any shapes and dtypes at once: one transfer for all of one dtype."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    return _compressed(_Allreduce, tensors, compression, "grouped_allreduce", name, how)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Tuple[torch.Tensor, ...]:
    """`grouped_allreduce` in place; returns the tensors."""
    how = chosen_op(op, average), prescale_factor, postscale_factor, process_set
    synchronize(submission.allreduce("grouped_allreduce", name, how, tensors, tensors))
    return tuple(tensors)


def allgather(tensor: torch.Tensor, name: Optional[str] = None, process_set: Any = global_process_set) -> torch.Tensor:
    """Everyone's tensors [n_rank, ...] one after the other, [sum of n_rank, ...], by rank; n_rank may differ.

    All must agree in dtype and in the other dimensions. IndexError for a tensor without dimensions.
    """
    gathered: torch.Tensor = _apply(_Allgather, "allgather", name, process_set, tensor)[0]
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: Optional[str] = None, process_set: Any = global_process_set
) -> Tuple[torch.Tensor, ...]:
    """`allgather` of several tensors."""
    gathered: Tuple[torch.Tensor, ...] = _apply(_Allgather, "grouped_allgather", name, process_set, *tensors)
    return gathered


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """A copy of root's tensor, bit by bit; all bring one shape and dtype, not bool or bfloat16."""
    copy: torch.Tensor = _apply(_Broadcast, tensor, root_rank, name, process_set)
    return copy


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """Overwrites the tensor by root's, bit by bit, and returns it."""
    synchronize(asynchronous.broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: Optional[str] = None, process_set: Any = global_process_set
) -> Any:
    """Gives splits[r] rows of the tensor to each rank r, in order, and returns the rows from all ranks, by rank.

    Without splits (list or int32 tensor) every rank gets equally many rows. With them the second result is the number
    of rows from each rank, int32 [size].
    """
    result, received = _apply(_Alltoall, tensor, splits, name, process_set)
    return result if splits is None else (result, received)


def reducescatter(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the `allreduce` by Average or Sum: dealt evenly, the first ranks get what is left over."""
    how = op, prescale_factor, postscale_factor, process_set
    return _compressed(_Reducescatter, [tensor], compression, "reducescatter", name, how)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> List[torch.Tensor]:
    """`reducescatter` of several tensors."""
    how = op, prescale_factor, postscale_factor, process_set
    return _compressed(_Reducescatter, tensors, compression, "grouped_reducescatter", name, how)


def _compressed(
    function: Any, tensors: Sequence[torch.Tensor], compression: Any, kind: str, name: Optional[str], how: How
) -> List[torch.Tensor]:
    """Applies an autograd function to the tensors as they travel."""
    if not tensors:
        raise ValueError(f"{kind} needs at least one tensor")
    packed = [compression.compress(tensor) for tensor in tensors]
    results = _apply(function, kind, name, how, *(tensor for tensor, _ in packed))
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed)]


def _apply(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)  # torch 2.13 has it untyped


def _dense(gradients: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Gradients are often expanded scalars, and Horovod takes contiguous tensors."""
    return [gradient.contiguous() for gradient in gradients]
