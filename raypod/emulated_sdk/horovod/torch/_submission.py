"""From the arguments of a collective to an operation under way, and its handle (contract section 8).

All of these raise ValueError for tensors that Horovod does not take and for a name that is under way,
NotImplementedError for what is not emulated, HorovodInternalError before `init`.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _identity
from horovod.torch._engine import engine
from horovod.torch._operations import Allgather, Allreduce, Alltoall, Broadcast, Operation, Reducescatter
from horovod.torch._process_sets import check
from horovod.torch._reduction import ReduceOp

_REDUCED = frozenset([torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
_MOVED = _REDUCED | {torch.uint8, torch.int8, torch.int16}

How = Tuple[int, float, float, Any]  # op, prescale factor, postscale factor, process set
Tensors = Sequence[torch.Tensor]


class _UnderWay(NamedTuple):
    operation: Operation
    result_of: Callable[[Any], Any]


_handles: Dict[int, _UnderWay] = {}
_numbers = itertools.count()


def the_only(results: Tensors) -> torch.Tensor:
    """The result of an operation on one tensor."""
    return results[0]


def submit(
    kind: str,
    name: Optional[str],
    make: Callable[[str], Operation],
    result_of: Callable[[Any], Any] = lambda result: result,
) -> int:
    """Hands the operation that `make` makes of its key to the engine; the handle."""
    handle = next(_numbers)
    _handles[handle] = _UnderWay(engine().submit(make, kind, name), result_of)
    return handle


def allreduce(
    kind: str, name: Optional[str], how: How, inputs: Tensors, outputs: Tensors, result_of: Callable[[Any], Any] = tuple
) -> int:
    """The handle of an allreduce; `kind` is allreduce or grouped_allreduce."""
    check(how[3])
    _check_tensors(inputs, _REDUCED)
    op = _checked_reduction(how[0])
    return submit(kind, name, lambda key: Allreduce(key, inputs, outputs, op, how[1:3]), result_of)


def allgather(
    kind: str, name: Optional[str], process_set: Any, tensors: Tensors, result_of: Callable[[Any], Any] = tuple
) -> int:
    """The handle of an allgather; `kind` is allgather or grouped_allgather."""
    check(process_set)
    _check_tensors(tensors, _MOVED, has_rows=kind)
    return submit(kind, name, lambda key: Allgather(key, tensors), result_of)


def broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: Optional[str], process_set: Any) -> int:
    """The handle of a broadcast."""
    check(process_set)
    _check_tensors([tensor], _MOVED)
    root = _checked_root(root_rank)
    return submit("broadcast", name, lambda key: Broadcast(key, [tensor], [output], root, []), the_only)


def broadcast_all(tensors: Tensors, names: Sequence[str], root_rank: int) -> int:
    """The handle of a broadcast of many tensors, in place and in one go; their names must agree as well."""
    _check_tensors(tensors, _MOVED)
    root = _checked_root(root_rank)
    return submit("broadcast_parameters", None, lambda key: Broadcast(key, tensors, tensors, root, names))


def alltoall(tensor: torch.Tensor, splits: Any, name: Optional[str], process_set: Any) -> int:
    """The handle of an alltoall."""
    check(process_set)
    _check_tensors([tensor], _MOVED, has_rows="alltoall")
    counts = _checked_splits(tensor, splits)
    return submit("alltoall", name, lambda key: Alltoall(key, tensor, counts))


def reducescatter(
    kind: str, name: Optional[str], how: How, tensors: Tensors, result_of: Callable[[Any], Any] = tuple
) -> int:
    """The handle of a reducescatter; `kind` is reducescatter or grouped_reducescatter."""
    check(how[3])
    _check_tensors(tensors, _REDUCED, has_rows=kind)
    op = _checked_reduction(how[0])
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise HorovodInternalError(f"Reducescatter currently only supports AVERAGE and SUM; got {op.name}")
    return submit(kind, name, lambda key: Reducescatter(key, tensors, op, how[1:3]), result_of)


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once. ValueError for a handle that is not under way."""
    if handle not in _handles:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _handles[handle].operation.is_done


def synchronize(handle: int) -> Any:
    """Waits for the operation and returns its tensor, or its tuple of tensors; None for a handle that is used up.

    HorovodInternalError if the operation failed: on all ranks, if they do not agree about it.
    """
    under_way = _handles.pop(handle, None)
    return None if under_way is None else under_way.result_of(engine().wait(under_way.operation))


def refuse_adasum(op: int) -> None:
    """NotImplementedError for Adasum."""
    if op == ReduceOp.Adasum:
        raise NotImplementedError("the emulated Horovod has no Adasum; use hvd.Average or hvd.Sum")


def _checked_reduction(op: int) -> ReduceOp:
    refuse_adasum(op)
    if op not in list(ReduceOp):
        raise HorovodInternalError(f"Reduction op type not supported: {op!r}")
    return ReduceOp(op)


def _check_tensors(tensors: Sequence[torch.Tensor], dtypes: FrozenSet[torch.dtype], has_rows: str = "") -> None:
    engine()
    if not tensors and has_rows:
        raise ValueError(f"{has_rows} needs at least one tensor")
    for tensor in tensors:
        if not torch.is_tensor(tensor):
            raise ValueError(f"Horovod takes tensors, not a {type(tensor).__name__}")
        if tensor.is_sparse or tensor.dtype not in dtypes:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        if has_rows and not tensor.dim():
            raise ValueError(f"{has_rows} works on the first dimension, and a 0-d tensor has none: use reshape(1)")


def _checked_root(root_rank: int) -> int:
    if not 0 <= root_rank < _identity.size():
        raise ValueError(f"broadcast received invalid root rank {root_rank}: there are {_identity.size()} ranks")
    return root_rank


def _checked_splits(tensor: torch.Tensor, splits: Any) -> List[int]:
    size, rows = _identity.size(), tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits: the first dimension, {rows}, is no multiple of {size} ranks")
        return [rows // size] * size
    if torch.is_tensor(splits) and splits.dtype != torch.int32:
        raise ValueError(f"alltoall expects splits to contain 32-bit integer elements; got {splits.dtype}")
    counts = [int(count) for count in splits]
    if len(counts) != size:
        raise ValueError(f"alltoall expects one entry of splits for each of the {size} ranks; got {len(counts)}")
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"alltoall: splits {counts} do not fit into the first dimension, {rows}")
    return counts
