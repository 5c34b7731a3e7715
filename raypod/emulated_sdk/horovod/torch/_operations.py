"""The collective operations as the engine runs them: what the ranks must agree on, and the transfers.

An allreduce computes every element on one rank, in the order of the ranks, so that all ranks get the same bits.
float16 and bfloat16 are reduced in float32 and rounded once, integers in int64.
"""

from __future__ import annotations

import enum
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from _pod.wires import Group, as_bytes, even_slices, wait_all

from horovod.torch._agreement import Description

Tensors = Sequence[torch.Tensor]
Scales = Tuple[float, float]  # prescale and postscale factor


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

    def __init__(self, key: str, how: str, tensors: List[List[Any]], own: Sequence[int] = ()) -> None:
        self.description = Description(key, self.kind, how, tensors, list(own))
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

    def __init__(self, key: str, inputs: Tensors, outputs: Tensors, op: ReduceOp, scales: Scales) -> None:
        self.op, self.prescale, self.postscale = op, float(scales[0]), float(scales[1])
        how = f"{op.name} * {self.prescale!r} * {self.postscale!r}"
        super().__init__(key, how, [[dtype_name(tensor), list(tensor.shape)] for tensor in inputs])
        self.inputs, self.outputs = inputs, outputs
        self.result = outputs

    @classmethod
    def of_zeros(cls, description: Description) -> Allreduce:
        """Return what a rank that has joined contributes to an operation of the others."""
        name, prescale, postscale = description.how.split(" * ")
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in description.tensors]
        return cls(description.key, zeros, zeros, ReduceOp[name], (float(prescale), float(postscale)))

    def run(self, group: Group) -> None:
        """See `run_together`."""
        run_together(group, [self])


def run_together(group: Group, operations: Sequence[Allreduce]) -> None:
    """Run allreduces of the same `how` with one transfer per dtype."""
    first = operations[0]
    by_dtype: Dict[torch.dtype, List[Tuple[torch.Tensor, torch.Tensor]]] = {}
    for operation in operations:
        for pair in zip(operation.inputs, operation.outputs):
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for pairs in by_dtype.values():
        flat = scaled(torch.cat([tensor.data.reshape(-1) for tensor, _ in pairs]), first.prescale)
        reduce_(group, flat, first.op)
        pieces = scaled(flat, first.postscale).split_with_sizes([tensor.numel() for tensor, _ in pairs])
        for (_, output), piece in zip(pairs, pieces):
            output.data.copy_(piece.view(output.shape))


def reduce_(group: Group, flat: torch.Tensor, op: ReduceOp) -> None:
    """Reduce the flat contiguous tensors of all ranks in place: each rank reduces one slice and sends it to all."""
    slices = even_slices(0, flat.numel(), group.size)
    own = slices[group.rank]
    parts = [flat.new_empty(own.stop - own.start) for _ in range(group.size)]
    parts[group.rank] = flat[own]
    _exchange(group, [flat[each] for each in slices], parts)
    flat[own] = reduced(parts, op)
    _exchange(group, [flat[own]] * group.size, [flat[each] for each in slices])


def reduced(parts: Tensors, op: ReduceOp) -> torch.Tensor:
    """Return the reduction of the parts, first to last, computed in a wider dtype where needed; a new tensor."""
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
    """Return the tensor times the factor in its dtype; integers are rounded towards zero."""
    return tensor if factor == 1.0 else (tensor.to(torch.float64) * factor).to(tensor.dtype)


class Allgather(Operation):
    """Concatenates the tensors of all ranks along their first dimension, whose length may differ."""

    kind = "ALLGATHER"

    def __init__(self, key: str, inputs: Tensors) -> None:
        lengths = [tensor.shape[0] for tensor in inputs]
        super().__init__(key, "", [_without_length(tensor) for tensor in inputs], lengths)
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
        super().__init__(key, f"from rank {root}", tensors)
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
        super().__init__(key, "", [_without_length(tensor)], splits)
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

    def __init__(self, key: str, inputs: Tensors, op: ReduceOp, scales: Scales) -> None:
        outputs = [torch.empty_like(tensor) for tensor in inputs]
        self._reduction = Allreduce(key, inputs, outputs, op, scales)
        super().__init__(key, self._reduction.description.how, self._reduction.description.tensors)

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

    def __init__(self) -> None:
        super().__init__("barrier", "", [])

    def run(self, group: Group) -> None:
        """Do nothing: all ranks have submitted it."""


class Join(Operation):
    """This rank has no more data. The engine completes it when all ranks have joined; the result is the last rank."""

    kind = "JOIN"

    def __init__(self) -> None:
        super().__init__("join", "", [])


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
