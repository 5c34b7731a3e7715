"""Reduction of one flat tensor over all ranks: the arithmetic under `allreduce` (contract section 8).

Every element is combined by one rank, in the order of the ranks, so that all ranks get the same bits. float16 and
bfloat16 are combined in float32 and rounded once; integers in int64.
"""

from __future__ import annotations

import enum
from typing import List, Sequence

import torch
from _emulated_pod import Group, Transfer, cut


class ReduceOp(enum.IntEnum):
    """How `allreduce` combines; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def reduce_(wires: Group, flat: torch.Tensor, op: ReduceOp) -> None:
    """Combines everyone's flat contiguous tensor in place.

    It is cut into a slice per rank: each rank receives its slice from all others, and hands the result round.
    """
    slices = cut(0, flat.numel(), wires.size)
    mine = slices[wires.rank]
    parts = [flat.new_empty(mine.stop - mine.start) for _ in range(wires.size)]
    parts[wires.rank] = flat[mine]
    tag = wires.next_tag()
    arrivals = [wires.receive(parts[peer], peer, tag) for peer in wires.peers]
    _wait(arrivals + [wires.send(flat[slices[peer]], peer, tag) for peer in wires.peers])
    flat[mine] = combined(parts, op)
    arrivals = [wires.receive(flat[slices[peer]], peer, tag) for peer in wires.peers]
    _wait(arrivals + [wires.send(flat[mine], peer, tag) for peer in wires.peers])


def combined(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The parts combined from the first to the last, in a wider dtype where that matters; a new tensor."""
    dtype = parts[0].dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.int64
    elif dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        if op in (ReduceOp.Sum, ReduceOp.Average):
            total += part.to(dtype)
        elif op is ReduceOp.Product:
            total *= part.to(dtype)
        elif op is ReduceOp.Min:
            torch.minimum(total, part.to(dtype), out=total)
        else:
            torch.maximum(total, part.to(dtype), out=total)
    if op is ReduceOp.Average:
        total.div_(len(parts), rounding_mode="trunc" if dtype is torch.int64 else None)
    return total.to(parts[0].dtype)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The tensor times the factor in the tensor's own dtype; integers are rounded towards zero."""
    return tensor if factor == 1.0 else (tensor.to(torch.float64) * factor).to(tensor.dtype)


def _wait(transfers: List[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
