"""The collective operations as the engine runs them: what the ranks must agree on, and the transfers.

An allreduce computes every element on one rank, in the order of the ranks, so that all ranks get the same bits.
float16 and bfloat16 are reduced in float32 and rounded once, integers in int64. As in Horovod, each rank multiplies its
own tensor by the prescale factor and rounds it to its dtype before the reduction, and the postscale factor, divided by
the number of ranks for Average, multiplies the rounded result.

The ranks in this module are those of the process set, 0 to its size - 1.
"""

from __future__ import annotations

import enum
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from _pod.reduce import even_slices
from _pod.wires import Group, as_bytes, wait_all

from horovod.torch._agreement import Description

Tensors = Sequence[torch.Tensor]
Factors = Tuple[float, float]  # prescale and postscale factor


class ReduceOp(enum.IntEnum):
    """The reduction of `allreduce`; the values are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


class Operation:
    """One collective operation of this rank, from submission to completion."""

    kind = ""

    def __init__(
        self,
        key: str,
        tensors: List[List[Any]],
        own: Sequence[int] = (),
        *,
        op: int = -1,
        factors: Factors = (1.0, 1.0),
        root: int = -1,
    ) -> None:
        self.description = Description(key, self.kind, op, [float(each) for each in factors], root, tensors, list(own))
        self.result: Any = None
        self.owns: List[List[int]] = []  # `Description.own` of each rank, once exchanged
        self.error: Optional[Exception] = None
        self.is_done = False

    def run(self, group: Group) -> None:
        """Run the transfers, in the engine's thread, and set `result`."""
        raise NotImplementedError


class Allreduce(Operation):
    """Reduces the tensors at each position of the ranks' lists; dtypes may be mixed."""

    kind = "ALLREDUCE"

    def __init__(self, key: str, inputs: Tensors, outputs: Tensors, op: ReduceOp, factors: Factors) -> None:
        tensors = [[dtype_name(tensor), list(tensor.shape)] for tensor in inputs]
        super().__init__(key, tensors, op=op, factors=factors)
        self.inputs, self.outputs = inputs, outputs
        self.result = outputs

    @classmethod
    def of_zeros(cls, description: Description) -> Allreduce:
        """Return what a rank that has joined contributes to an operation of the others."""
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in description.tensors]
        prescale, postscale = description.factors
        return cls(description.key, zeros, zeros, ReduceOp(description.op), (prescale, postscale))

    def run(self, group: Group) -> None:
        """See `run_together`."""
        run_together(group, [self])


def run_together(group: Group, operations: Sequence[Allreduce]) -> None:
    """Run allreduces of the same op and factors with one transfer per dtype."""
    description = operations[0].description
    op, (prescale, postscale) = ReduceOp(description.op), description.factors
    by_dtype: Dict[torch.dtype, List[Tuple[torch.Tensor, torch.Tensor]]] = {}
    for operation in operations:
        for pair in zip(operation.inputs, operation.outputs):
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for pairs in by_dtype.values():
        flat = scaled(torch.cat([tensor.data.reshape(-1) for tensor, _ in pairs]), prescale)
        reduce_(group, flat, op, postscale)
        pieces = flat.split_with_sizes([tensor.numel() for tensor, _ in pairs])
        for (_, output), piece in zip(pairs, pieces):
            output.data.copy_(piece.view(output.shape))


def reduce_(group: Group, flat: torch.Tensor, op: ReduceOp, postscale: float = 1.0) -> None:
    """Reduce the flat contiguous tensors of all ranks in place: each rank reduces one slice and sends it to all."""
    slices = even_slices(0, flat.numel(), group.size)
    own = slices[group.rank]
    parts = [flat.new_empty(own.stop - own.start) for _ in range(group.size)]
    parts[group.rank] = flat[own]
    _exchange(group, [flat[each] for each in slices], parts)
    flat[own] = scaled(reduced(parts, op), postscale / group.size if op is ReduceOp.Average else postscale)
    _exchange(group, [flat[own]] * group.size, [flat[each] for each in slices])


def reduced(parts: Tensors, op: ReduceOp) -> torch.Tensor:
    """Return the reduction (for Average, the sum) of the parts, first to last, in their dtype; a new tensor."""
    dtype = parts[0].dtype
    wide = _WIDE.get(dtype, dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        if op in (ReduceOp.Sum, ReduceOp.Average):
            total += part.to(wide)
        elif op is ReduceOp.Product:
            total *= part.to(wide)
        elif op is ReduceOp.Min:
            torch.minimum(total, part.to(wide), out=total)
        else:
            torch.maximum(total, part.to(wide), out=total)
    return total.to(dtype)


_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int32: torch.int64}


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times the factor: in its dtype, half in float32, integers in float64, rounded towards zero."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    wide = _WIDE.get(dtype, dtype) if dtype.is_floating_point else torch.float64
    return (tensor.to(wide) * factor).to(dtype)


class Allgather(Operation):
    """Concatenates the tensors of all ranks along their first dimension, whose length may differ."""

    kind = "ALLGATHER"

    def __init__(self, key: str, inputs: Tensors) -> None:
        lengths = [tensor.shape[0] for tensor in inputs]
        super().__init__(key, [_without_length(tensor) for tensor in inputs], lengths)
        self.inputs = inputs

    def run(self, group: Group) -> None:
        """See the class."""
        lengths = zip(*self.owns)  # by tensor
        self.result = [_gathered(group, tensor.data, list(each)) for tensor, each in zip(self.inputs, lengths)]


def _gathered(group: Group, own: torch.Tensor, lengths: List[int]) -> torch.Tensor:
    result = own.new_empty(sum(lengths), *own.shape[1:])
    parts = result.split_with_sizes(lengths)
    parts[group.rank].copy_(own)
    _exchange(group, [own] * group.size, parts)
    return result


class Broadcast(Operation):
    """Copies root's inputs bit by bit into the outputs; several tensors are transferred as one."""

    kind = "BROADCAST"

    def __init__(self, key: str, inputs: Tensors, outputs: Tensors, root: int, names: Sequence[str] = ()) -> None:
        tensors: List[List[Any]] = [[dtype_name(tensor), list(tensor.shape)] for tensor in inputs]
        for description, name in zip(tensors, names):
            description.append(name)
        super().__init__(key, tensors, root=root)
        self.inputs, self.outputs, self._root = inputs, outputs, root
        self.result = outputs

    def run(self, group: Group) -> None:
        """See the class."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.inputs]
        if group.rank == self._root:
            flat = torch.cat([as_bytes(tensor.data) for tensor in self.inputs])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast_(flat, self._root)
        for output, piece in zip(self.outputs, flat.split_with_sizes(sizes)):
            as_bytes(output.data).copy_(piece)


class Alltoall(Operation):
    """Distributes the rows of each rank's tensor: `splits[r]` rows to rank r."""

    kind = "ALLTOALL"

    def __init__(self, key: str, tensor: torch.Tensor, splits: List[int]) -> None:
        super().__init__(key, [_without_length(tensor)], splits)
        self._tensor = tensor

    def run(self, group: Group) -> None:
        """See the class."""
        splits, received = self.owns[group.rank], [row[group.rank] for row in self.owns]
        tensor = self._tensor.data
        result = tensor.new_empty(sum(received), *tensor.shape[1:])
        given = tensor[: sum(splits)].split_with_sizes(splits)
        parts = result.split_with_sizes(received)
        parts[group.rank].copy_(given[group.rank])
        _exchange(group, given, parts)
        self.result = result, torch.tensor(received, dtype=torch.int32)


class Reducescatter(Operation):
    """Reduces the tensors and gives each rank its rows, evenly; the first ranks get one more if needed."""

    kind = "REDUCESCATTER"

    def __init__(self, key: str, inputs: Tensors, op: ReduceOp, factors: Factors) -> None:
        outputs = [torch.empty_like(tensor) for tensor in inputs]
        self._reduction = Allreduce(key, inputs, outputs, op, factors)
        super().__init__(key, self._reduction.description.tensors, op=op, factors=factors)

    def run(self, group: Group) -> None:
        """See the class."""
        self._reduction.run(group)
        self.result = [_own_rows(group, tensor) for tensor in self._reduction.outputs]


def _own_rows(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    rows, rest = divmod(tensor.shape[0], group.size)
    start = group.rank * rows + min(group.rank, rest)
    return tensor[start : start + rows + (group.rank < rest)].clone()


class Barrier(Operation):
    """Completes when all ranks have submitted it."""

    kind = "BARRIER"

    def __init__(self, key: str) -> None:
        super().__init__(key, [])

    def run(self, group: Group) -> None:
        """Do nothing: all ranks have submitted it."""


class Join(Operation):
    """This rank has no more data. The engine completes it when all ranks have joined; the result is the last rank."""

    kind = "JOIN"

    def __init__(self) -> None:
        super().__init__("join", [])


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the dtype without `torch.`."""
    return str(tensor.dtype).rpartition(".")[2]


def _without_length(tensor: torch.Tensor) -> List[Any]:
    return [dtype_name(tensor), [None, *tensor.shape[1:]]]


def _exchange(group: Group, given: Tensors, parts: Tensors) -> None:
    """Send given[peer] to each peer, and receive parts[peer] from it."""
    tag = group.next_tag()
    transfers = [group.receive(parts[peer], peer, tag) for peer in group.peers]
    wait_all(transfers + [group.send(given[peer], peer, tag) for peer in group.peers])
