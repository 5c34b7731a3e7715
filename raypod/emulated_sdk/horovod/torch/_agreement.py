"""What the ranks must agree on about an operation, and the error if they do not.

The first sentence of an error is Horovod's; it is followed by what each rank submitted.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

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
        return _differ("group sizes", "submitted a group of {}", len(one.tensors), len(other.tensors), " tensors")
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


def _differ(what: str, form: str, one: Any, other: Any, unit: str = "") -> str:
    return f"Mismatched {what}: One rank {form.format(one)}{unit}, but another rank {form.format(other)}{unit}."


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
