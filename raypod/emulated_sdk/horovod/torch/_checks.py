"""Checks of the arguments of collectives."""

from __future__ import annotations

import math
import operator
import warnings
from typing import Any, FrozenSet, List, Optional, Sequence

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.torch._operations import ReduceOp, Tensors

REDUCED = frozenset([torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
MOVED = REDUCED | {torch.uint8, torch.int8, torch.int16}


def check_tensors(tensors: Tensors, dtypes: FrozenSet[torch.dtype], rows_for: str = "") -> None:
    """Raise ValueError for tensors that Horovod does not take; `rows_for` needs at least one, and no 0-d tensor."""
    if not tensors and rows_for:
        raise ValueError(f"{rows_for} needs at least one tensor")
    for tensor in tensors:
        if not torch.is_tensor(tensor):
            raise ValueError(f"Horovod takes tensors, not a {type(tensor).__name__}")
        if tensor.is_sparse or tensor.dtype not in dtypes:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")
        if rows_for and not tensor.dim():
            raise ValueError(f"{rows_for} uses the first dimension; a 0-d tensor has none: use reshape(1)")


def checked_integer(value: Any, parameter: str) -> int:
    """Return the integer; TypeError for another type, of which Horovod's binding does not take the value either."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{parameter} is an integer, got {value!r}") from None


def checked_factor(value: Any, parameter: str) -> float:
    """Return the number; TypeError for another type, also for text, which `float` would read.

    HorovodInternalError for NaN: Horovod finds that the ranks disagree, as it is unequal to itself.
    """
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{parameter} is a number, got {value!r}")
    if math.isnan(value):
        raise HorovodInternalError(f"{parameter} is NaN")
    return float(value)


def checked_compression(compression: Any) -> Any:
    """Return the compression; AttributeError if it cannot compress."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise AttributeError(f"compression is hvd.Compression.none or hvd.Compression.fp16, got {compression!r}")
    return compression


def check_name(name: Any) -> None:
    """Raise TypeError unless it is None or text."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string or None, got {name!r}")


def reject_adasum(op: int) -> None:
    """Raise NotImplementedError for Adasum."""
    if op == ReduceOp.Adasum:
        raise NotImplementedError("the emulated Horovod has no Adasum; use hvd.Average or hvd.Sum")


def chosen_op(op: Optional[int], average: Optional[bool]) -> int:
    """Return the reduction that `op` or the deprecated `average` selects; ValueError if both are given."""
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if average is None:
        return ReduceOp.Average if op is None else op
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=4
    )
    return ReduceOp.Average if average else ReduceOp.Sum


def checked_op(op: int) -> ReduceOp:
    """Return the reduction; HorovodInternalError if it does not exist, TypeError if it is no integer."""
    reject_adasum(op)
    number = checked_integer(op, "op")
    if number not in list(ReduceOp):
        raise HorovodInternalError(f"Reduction op type not supported: {op!r}")
    return ReduceOp(number)


def checked_root(root_rank: int, ranks: Sequence[int]) -> int:
    """Return the index of the rank among those of the process set; ValueError if it does not belong to it.

    TypeError if it is no integer.
    """
    root_rank = checked_integer(root_rank, "root_rank")
    if root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set {list(ranks)}")
    return ranks.index(root_rank)


def checked_splits(tensor: torch.Tensor, splits: Any, ranks: int) -> List[int]:
    """Return the number of rows for each of `ranks` ranks; ValueError if they do not fit the tensor."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"alltoall without splits: the first dimension, {rows}, is not a multiple of {ranks} ranks"
            )
        return [rows // ranks] * ranks
    if torch.is_tensor(splits) and splits.dtype != torch.int32:
        raise ValueError(f"alltoall expects splits to contain 32-bit integer elements; got {splits.dtype}")
    counts = [int(count) for count in splits]
    if len(counts) != ranks:
        raise ValueError(f"alltoall expects one entry of splits for each of the {ranks} ranks; got {len(counts)}")
    if min(counts) < 0 or sum(counts) > rows:
        raise ValueError(f"alltoall: splits {counts} do not fit into the first dimension, {rows}")
    return counts
