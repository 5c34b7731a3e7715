"""The collectives as pieces of work for the engine (contract section 8): what they need agreed, and what they do."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from _emulated_pod import Group, Transfer, as_bytes

from horovod.torch._reduction import ReduceOp, reduce_, scaled

Owns = List[List[int]]  # by rank: what each brought for itself


class Description(NamedTuple):
    """What an operation tells the other ranks. Key and all but `own` must be equal on all of them."""

    key: str
    kind: str
    how: str  # reduction and factors, or the root
    tensors: List[List[Any]]  # dtype, shape (None: free), and where there is one the name
    own: List[int]  # lengths of free dimensions, or splits

    def differences(self, other: Description) -> Tuple[str, str]:
        """What this and the other rank say differently; two empty texts if nothing."""
        if (self.kind, self.how) != (other.kind, other.how):
            return f"{self.kind} {self.how}", f"{other.kind} {other.how}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(self.tensors)} tensors", f"{len(other.tensors)} tensors"
        for index, (mine, theirs) in enumerate(zip(self.tensors, other.tensors)):
            if mine != theirs:
                which = f"tensor {index} of {len(self.tensors)}: " if len(self.tensors) > 1 else ""
                return which + _text(mine), which + _text(theirs)
        return "", ""


class Operation:
    """One collective of this rank, from the call to its end."""

    kind = ""

    def __init__(self, key: str, how: str, tensors: List[List[Any]], own: Sequence[int] = ()) -> None:
        self.description = Description(key, self.kind, how, tensors, list(own))
        self.result: Any = None
        self.owns: Owns = []  # by rank, once all have told it
        self.error: Optional[Exception] = None
        self.is_done = False

    def run(self, wires: Group, owns: Owns) -> None:
        """Does the work with all other ranks and keeps the result. In the engine's thread."""
        raise NotImplementedError


class Allreduce(Operation):
    """Combines tensors of one place in everyone's list; several dtypes may be mixed."""

    kind = "ALLREDUCE"

    def __init__(
        self, key: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: ReduceOp, scales: Any
    ) -> None:
        self.op, self.prescale, self.postscale = op, float(scales[0]), float(scales[1])
        how = f"{op.name} * {self.prescale!r} * {self.postscale!r}"
        super().__init__(key, how, [[dtype_name(tensor), list(tensor.shape)] for tensor in inputs])
        self.inputs, self.outputs = inputs, outputs
        self.result = outputs

    @classmethod
    def of_zeros(cls, told: Description) -> Allreduce:
        """What a rank that has joined contributes to the others' operation."""
        name, prescale, postscale = told.how.split(" * ")
        zeros = [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in told.tensors]
        return cls(told.key, zeros, zeros, ReduceOp[name], (prescale, postscale))

    def run(self, wires: Group, owns: Owns) -> None:
        """See `run_together`."""
        run_together(wires, [self])


def run_together(wires: Group, operations: Sequence[Allreduce]) -> None:
    """Runs allreduces of the same `how`: one transfer for all tensors of one dtype."""
    first = operations[0]
    by_dtype: Dict[torch.dtype, List[Tuple[torch.Tensor, torch.Tensor]]] = {}
    for operation in operations:
        for pair in zip(operation.inputs, operation.outputs):
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for pairs in by_dtype.values():
        flat = torch.cat([data(tensor).reshape(-1) for tensor, _ in pairs])
        flat = scaled(flat, first.prescale)
        reduce_(wires, flat, first.op)
        pieces = scaled(flat, first.postscale).split_with_sizes([tensor.numel() for tensor, _ in pairs])
        for (_, output), piece in zip(pairs, pieces):
            data(output).copy_(piece.view(output.shape))


class Allgather(Operation):
    """Joins everyone's tensors along their first dimension, whose length may differ."""

    kind = "ALLGATHER"

    def __init__(self, key: str, inputs: Sequence[torch.Tensor]) -> None:
        lengths = [tensor.shape[0] for tensor in inputs]
        super().__init__(key, "", [_free_first(tensor) for tensor in inputs], lengths)
        self.inputs = inputs

    def run(self, wires: Group, owns: Owns) -> None:
        """See the class."""
        self.result = [
            self._gathered(wires, own, [row[index] for row in owns]) for index, own in enumerate(self.inputs)
        ]

    @staticmethod
    def _gathered(wires: Group, own: torch.Tensor, lengths: List[int]) -> torch.Tensor:
        own = data(own)
        result = own.new_empty(sum(lengths), *own.shape[1:])
        parts = result.split_with_sizes(lengths)
        parts[wires.rank].copy_(own)
        _exchange(wires, [own] * wires.size, parts)
        return result


class Broadcast(Operation):
    """Overwrites the outputs by root's inputs, bit by bit; several travel as one flat tensor."""

    kind = "BROADCAST"

    def __init__(
        self, key: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], root: int, names: Sequence[str]
    ) -> None:
        told: List[List[Any]] = [[dtype_name(tensor), list(tensor.shape)] for tensor in inputs]
        for description, name in zip(told, names):
            description.append(name)
        super().__init__(key, f"from rank {root}", told)
        self.inputs, self.outputs, self._root = inputs, outputs, root
        self.result = outputs

    def run(self, wires: Group, owns: Owns) -> None:
        """See the class."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in self.inputs]
        if wires.rank == self._root:
            flat = torch.cat([as_bytes(data(tensor)) for tensor in self.inputs])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
        wires.broadcast_(flat, self._root)
        for output, piece in zip(self.outputs, flat.split_with_sizes(sizes)):
            as_bytes(data(output)).copy_(piece)


class Alltoall(Operation):
    """Deals out the rows of everyone's tensor: `splits[r]` of them to rank r."""

    kind = "ALLTOALL"

    def __init__(self, key: str, tensor: torch.Tensor, splits: List[int]) -> None:
        super().__init__(key, "", [_free_first(tensor)], splits)
        self._tensor = tensor

    def run(self, wires: Group, owns: Owns) -> None:
        """See the class."""
        lengths = [row[wires.rank] for row in owns]
        tensor = data(self._tensor)
        result = tensor.new_empty(sum(lengths), *tensor.shape[1:])
        given = tensor[: sum(owns[wires.rank])].split_with_sizes(owns[wires.rank])
        parts = result.split_with_sizes(lengths)
        parts[wires.rank].copy_(given[wires.rank])
        _exchange(wires, given, parts)
        self.result = result, torch.tensor(lengths, dtype=torch.int32)


class Reducescatter(Operation):
    """Combines the tensors and gives each rank its rows: dealt evenly, the first ranks get what is left over."""

    kind = "REDUCESCATTER"

    def __init__(self, key: str, inputs: Sequence[torch.Tensor], op: ReduceOp, scales: Any) -> None:
        outputs = [torch.empty_like(tensor) for tensor in inputs]
        self._reduction = Allreduce(key, inputs, outputs, op, scales)
        super().__init__(key, self._reduction.description.how, self._reduction.description.tensors)

    def run(self, wires: Group, owns: Owns) -> None:
        """See the class."""
        self._reduction.run(wires, owns)
        self.result = [self._rows(wires, tensor) for tensor in self._reduction.outputs]

    @staticmethod
    def _rows(wires: Group, tensor: torch.Tensor) -> torch.Tensor:
        each, rest = divmod(tensor.shape[0], wires.size)
        start = wires.rank * each + min(wires.rank, rest)
        return tensor[start : start + each + (wires.rank < rest)].clone()


class Barrier(Operation):
    """Only agrees."""

    kind = "BARRIER"

    def __init__(self) -> None:
        super().__init__("barrier", "", [])

    def run(self, wires: Group, owns: Owns) -> None:
        """Nothing is left to do: all have come."""


class Join(Operation):
    """This rank has no more data; the engine ends it when all ranks have none. The result is the last of them."""

    kind = "JOIN"

    def __init__(self) -> None:
        super().__init__("join", "", [])


def data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: it may be a leaf that requires a gradient, or be needed in a backward pass."""
    return tensor.data


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` for torch.float32."""
    return str(tensor.dtype).rpartition(".")[2]


def _free_first(tensor: torch.Tensor) -> List[Any]:
    return [dtype_name(tensor), [None, *tensor.shape[1:]]]


def _text(tensor: List[Any]) -> str:
    dtype, shape, *name = tensor
    lengths = ", ".join("*" if length is None else str(length) for length in shape)
    return "".join(f"{each}: " for each in name) + f"{dtype}[{lengths}]"


def _exchange(wires: Group, given: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Sends given[peer] to each peer and receives parts[peer] from it."""
    tag = wires.next_tag()
    transfers: List[Transfer] = [wires.receive(parts[peer], peer, tag) for peer in wires.peers]
    transfers += [wires.send(given[peer], peer, tag) for peer in wires.peers]
    for transfer in transfers:
        transfer.wait()
