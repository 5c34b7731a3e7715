"""The collectives of `horovod.torch` on tensors, with Horovod 0.28's signatures (contract section 8).

Before each one the ranks tell each other what they are about to do: if they differ all of them raise RuntimeError,
instead of mixing up data. `name` takes part in that; `process_set` can only be the one of all ranks (ValueError).
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch
from _emulated_pod import as_bytes

from ._agreement import CARRIED_BYTES, agree, global_process_set
from ._identity import (
    cross_rank,
    cross_size,
    group,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ._reduction import ReduceOp, combined, reduce_
from .compression import Compression

__all__ = [
    "Adasum",
    "Average",
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

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


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

    Any number of dimensions; all dtypes but bool. The Average of integers is rounded towards zero. The factors
    multiply before and after. ValueError for Adasum, for `op` together with `average`, and for bool.
    """
    results = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return results[0]


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
    return grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)[0]


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
    packed = [compression.compress(tensor.detach()) for tensor in tensors]
    sent = [tensor.clone(memory_format=torch.contiguous_format) for tensor, _ in packed]
    grouped_allreduce_(sent, average, name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(sent, packed)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> List[torch.Tensor]:
    """`grouped_allreduce` in place; returns the tensors."""
    chosen = _chosen_op(op, average)
    if any(tensor.dtype is torch.bool for tensor in tensors):
        raise ValueError("allreduce does not combine bool tensors; convert them to an integer dtype")
    doing = f"allreduce {chosen.name} of {_described(tensors)} * {prescale_factor:g} * {postscale_factor:g}"
    by_dtype: Dict[torch.dtype, List[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    flats = [
        _scaled(torch.cat([member.reshape(-1) for member in members]), prescale_factor) for members in by_dtype.values()
    ]
    _reduce_all_(flats, chosen, doing, name, process_set)
    for members, flat in zip(by_dtype.values(), flats):
        pieces = _scaled(flat, postscale_factor).split_with_sizes([member.numel() for member in members])
        for member, piece in zip(members, pieces):
            member.copy_(piece.view(member.shape))
    return list(tensors)


def allgather(tensor: torch.Tensor, name: Optional[str] = None, process_set: Any = global_process_set) -> torch.Tensor:
    """Everyone's tensors [n_rank, ...] one after the other, [sum of n_rank, ...], by rank; n_rank may differ.

    All must agree in dtype and in the other dimensions. ValueError for a tensor without dimensions.
    """
    if not tensor.dim():
        raise ValueError("allgather joins tensors along their first dimension; a 0-d tensor has none: use reshape(1)")
    agree(f"allgather of {tensor.dtype}[*{''.join(f', {length}' for length in tensor.shape[1:])}]", name, process_set)
    wires = group()
    lengths = [length for row in wires.gather_numbers([tensor.shape[0]]) for length in row]
    result = tensor.new_empty(sum(lengths), *tensor.shape[1:])
    parts = result.split_with_sizes(lengths)
    own = tensor.detach().contiguous()
    parts[wires.rank].copy_(own)
    tag = wires.next_tag()
    transfers = [wires.receive(parts[peer], peer, tag) for peer in wires.peers]
    transfers += [wires.send(own, peer, tag) for peer in wires.peers]
    for transfer in transfers:
        transfer.wait()
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """A copy of root's tensor, bit by bit; all bring one shape and dtype."""
    return broadcast_(tensor.detach().clone(memory_format=torch.contiguous_format), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
) -> torch.Tensor:
    """Overwrites the tensor by root's, bit by bit, and returns it; all bring one shape and dtype."""
    agree(f"broadcast from rank {checked_root(root_rank)} of {_described([tensor])}", name, process_set)
    flat = tensor.detach().contiguous()
    group().broadcast_(flat, root_rank)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat)
    return tensor


def barrier(process_set: Any = global_process_set) -> None:
    """Returns when all ranks have called it."""
    agree("barrier", None, process_set)


def checked_root(root_rank: int) -> int:
    """The rank, if there is one of that number; else ValueError."""
    if not 0 <= root_rank < size():
        raise ValueError(f"root_rank {root_rank} is not among the {size()} ranks")
    return root_rank


def _chosen_op(op: Optional[int], average: Optional[bool]) -> ReduceOp:
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        return Average if average in (None, True) else Sum
    chosen = ReduceOp(op)
    if chosen is Adasum:
        raise ValueError("the emulated Horovod has no Adasum; use hvd.Average or hvd.Sum")
    return chosen


def _reduce_all_(
    flats: Sequence[torch.Tensor], op: ReduceOp, doing: str, name: Optional[str], process_set: Any
) -> None:
    """Combines everyone's flat tensors in place; small ones travel with the agreement."""
    sizes = [flat.numel() * flat.element_size() for flat in flats]
    if sum(sizes) > CARRIED_BYTES:
        agree(doing, name, process_set)
        for flat in flats:
            reduce_(group(), flat, op)
        return
    content = torch.cat([torch.empty(0, dtype=torch.uint8), *map(as_bytes, flats)])
    table = agree(doing, name, process_set, content)
    for flat, columns in zip(flats, table.split_with_sizes(sizes, dim=1)):
        if flat.numel():
            aligned = columns.clone(memory_format=torch.contiguous_format)  # else it could not be seen as another dtype
            flat.copy_(combined(aligned.view(flat.dtype).unbind(), op))


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return " + ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times the factor in the tensor's own dtype; integers are rounded towards zero."""
    return tensor if factor == 1.0 else (tensor.to(torch.float64) * factor).to(tensor.dtype)
