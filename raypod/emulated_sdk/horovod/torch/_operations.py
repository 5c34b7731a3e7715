"""The collective operations as the engine runs them: checked arguments, what the ranks must agree on, transfers.

An allreduce computes every element on one rank, in the order of the ranks, so that all ranks get the same bits.
float16 and bfloat16 are reduced in float32 and rounded once, integers in int64. As in Horovod, each rank multiplies its
own tensor by the prescale factor and rounds it to its dtype before the reduction, and the postscale factor, divided by
the number of ranks for Average, multiplies the rounded result.

The ranks in this module are those of the process set, 0 to its size - 1.

If the ranks do not agree, the first sentence of the error is Horovod's; it is followed by what each rank submitted.
"""

from __future__ import annotations

import enum
import math
import operator
import warnings
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
from _pod.reduce import even_slices
from _pod.wires import Group, as_bytes, wait_all

from horovod.common.exceptions import HorovodInternalError

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


Tensor = List[Any]  # dtype, shape (first dimension None: it may differ), and the name if there is one


class Description(NamedTuple):
    """What a rank sends to the others about an operation. All but `own` must be equal on all ranks."""

    key: str
    kind: str
    op: int  # the ReduceOp; -1 if the operation does not reduce
    factors: List[float]  # prescale and postscale factor
    root: int  # the rank whose tensor is broadcast; -1 in other operations
    tensors: List[Tensor]
    own: List[int]  # this rank's lengths of the first dimensions that may differ, or its splits

    @property
    def is_absent(self) -> bool:
        """Whether this rank has no tensor to reduce and submitted zeros, whose length is given as 0."""
        return self.kind == "ALLREDUCE" and self.own == [0]

    def agrees_with(self, other: Description) -> bool:
        """Return whether the two ranks submitted the same."""
        return self[:-1] == other[:-1]

    def text(self, other: Description) -> str:
        """Return what this rank submitted, as far as `other` differs from it first."""
        if self[1:5] != other[1:5] or len(self.tensors) != len(other.tensors):
            root = f" from rank {self.root}" if self.root >= 0 else ""
            op = f" with op {self.op} and factors {self.factors[0]:g}, {self.factors[1]:g}" if self.op >= 0 else ""
            return f"{self.kind}{root}{op} of {len(self.tensors)} tensors"
        index = _first_difference(self.tensors, other.tensors)
        prefix = f"tensor {index} of {len(self.tensors)}: " if len(self.tensors) > 1 else ""
        return prefix + _text(self.tensors[index])


def settled(descriptions: Dict[int, Description]) -> Dict[int, Description]:
    """Return the descriptions by rank; if a rank gathers, those without a tensor as allgathers of no rows."""
    gather = next((each for each in descriptions.values() if each.kind == "ALLGATHER"), None)
    if gather is None:
        return descriptions
    nothing = gather._replace(own=[0] * len(gather.own))
    return {rank: nothing if each.is_absent else each for rank, each in descriptions.items()}


def disagreement(descriptions: Dict[int, Description]) -> Optional[str]:
    """Return the error if the ranks, by which `descriptions` are given, do not agree; else None."""
    first_rank, *others = descriptions
    first = descriptions[first_rank]
    different = [descriptions[rank] for rank in others if not first.agrees_with(descriptions[rank])]
    if not different:
        return None
    texts = [f"rank {first_rank}: {first.text(different[0])}"]
    for rank in others:
        own = descriptions[rank]
        texts.append(f"rank {rank}: {f'as rank {first_rank}' if own.agrees_with(first) else own.text(first)}")
    return f"{_sentence(first, different[0])} Operation {first.key!r}: {'; '.join(texts)}"


def _sentence(one: Description, other: Description) -> str:
    """Return Horovod's sentence for the first difference of two descriptions."""
    kind = one.kind
    if kind != other.kind:
        return _differ("operations", "did an {}", kind, other.kind)
    if len(one.tensors) != len(other.tensors):
        return _differ("group sizes", "submitted a group of {} tensors", len(one.tensors), len(other.tensors))
    if one.tensors != other.tensors:
        index = _first_difference(one.tensors, other.tensors)
        return _tensor_sentence(kind, one.tensors[index], other.tensors[index])
    if one.factors != other.factors:
        given = [f"({each.factors[0]:g}, {each.factors[1]:g})" for each in (one, other)]
        return _differ("prescale and/or postscale factors", "sent factors {}", *given)
    if one.op != other.op:
        return _differ("reduction operation", "sent reduction op {}", one.op, other.op)
    return _differ(f"{kind} root ranks", "specified root rank {}", one.root, other.root)


def _tensor_sentence(kind: str, one: Tensor, other: Tensor) -> str:
    if one[0] != other[0]:
        return _differ("data types", "had type {}", one[0], other[0])
    shapes = one[1], other[1]
    if shapes[0] == shapes[1]:
        return _differ(f"{kind} tensor names", "sent a tensor named {}", one[2], other[2])
    what = f"{kind} tensor shapes"
    if None not in shapes[0]:
        return _differ(what, "sent a tensor of shape {}", *map(_shape, shapes))
    if len(shapes[0]) != len(shapes[1]):
        return _differ(what, "sent a tensor of rank {}", len(shapes[0]), len(shapes[1]))
    dim = _first_difference(*shapes)
    return _differ(what, f"sent a tensor with dimension {dim} equal to {{}}", shapes[0][dim], shapes[1][dim])


def _differ(what: str, form: str, one: Any, other: Any) -> str:
    return f"Mismatched {what}: One rank {form.format(one)}, but another rank {form.format(other)}."


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next(index for index, (own, others) in enumerate(zip(one, other)) if own != others)


def _shape(lengths: Sequence[Optional[int]]) -> str:
    return f"[{', '.join('*' if length is None else str(length) for length in lengths)}]"


def _text(tensor: Tensor) -> str:
    dtype, shape, *name = tensor
    return "".join(f"{each}: " for each in name) + f"{dtype}{_shape(shape)}"


def join_error(kind: str, joined: Sequence[int]) -> str:
    """Return the error of an operation that is not an allreduce while ranks have joined."""
    advice = " Specify sparse_as_dense=True if using DistributedOptimizer." if kind == "ALLGATHER" else ""
    ranks = ", ".join(map(str, joined))
    return f"{kind.capitalize()} is not supported with Join at this time.{advice} Joined: rank {ranks}"


REDUCED = frozenset([torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
MOVED = REDUCED | {torch.uint8, torch.int8, torch.int16}


def check_tensors(tensors: Tensors, dtypes: FrozenSet[torch.dtype], rows_for: str = "") -> None:
    """Raise ValueError for tensors that Horovod does not take; `rows_for` takes no 0-d tensor."""
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
