"""PopART's own collective operators, which programs call by `poptorch.custom_op`, over the replicas of all processes.

Attributes, sizes and gradients are those of PopART's sources. `ReplicatedAllReduceTP` and `ReplicatedAllToAll` are
those of poptorch-experimental-addons, which tensor-parallel programs share.

Inferred: the order of the additions (the tree of the gradient reduction, so that the placement does not matter), zeros
as the padding of a ReplicatedReduceScatter, and that a grouping for another number of replicas is an Error.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

import torch
from _pod import reduce

from poptorch.custom_operators.exchange import Member, current
from poptorch.custom_operators.registry import built_in_emulation
from poptorch.environment import logger
from poptorch.errors import Error

_OPERATOR = "__collectiveOperator"
_COMM_GROUP = "__collectiveCommGroup"
_GROUPING = "__collectiveReplicaGrouping"

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# CollectiveOperator by its number. LogicalAnd (5) and LogicalOr (6) take tensors that these operators do not.
_NAMES = ("Add", "Mean", "Mul", "Min", "Max", "LogicalAnd", "LogicalOr", "SquareAdd", "Local")
_COMBINE: Dict[str, _Combine] = {
    "Add": torch.add,
    "Mean": torch.add,
    "Mul": torch.mul,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "SquareAdd": torch.add,
}
# Those of the emulated device: 32-bit integers are stored in 64 bits.
_DTYPES = (torch.float32, torch.half, torch.int64)


class ReplicaGroup(NamedTuple):
    """The group of one replica, and the replica's position in it.

    Attributes:
        member: the replica.
        operation: the name of the operator.
        replicas: the global indices of the group's replicas, in order.
    """

    member: Member
    operation: str
    replicas: Tuple[int, ...]

    @property
    def position(self) -> int:
        """The index of the replica in the group."""
        return self.replicas.index(self.member.index)

    @property
    def size(self) -> int:
        """Number of replicas of the group."""
        return len(self.replicas)

    def gather(self, tensor: torch.Tensor, direction: str = "") -> torch.Tensor:
        """Return the tensors of the group, [size, *shape]."""
        if tensor.dtype not in _DTYPES:
            raise Error(f"{self.operation} takes float, half and 32-bit integer tensors, not {tensor.dtype}")
        return self.member.gather(tensor, f"{self.operation}{direction}")[list(self.replicas)]

    def reduce(self, tensor: torch.Tensor, name: str = "Add", direction: str = "") -> torch.Tensor:
        """Return the tensors of the group combined by a collective operator, in the order of the gradient reduction."""
        if name == "Local":
            return tensor.clone()
        rows = list(self.gather(tensor, direction))
        if name == "SquareAdd":
            rows = [row * row for row in rows]
        for target, source in reduce.additions_within(self.size, 0, self.size):
            rows[target] = _COMBINE[name](rows[target], rows[source])
        total: torch.Tensor = rows[0]
        return total / self.size if name == "Mean" else total.clone()


def _group(operation: str, attributes: Dict[str, Any]) -> ReplicaGroup:
    """Return the group that the attributes describe; all replicas by default. Removes them from `attributes`."""
    member = current(operation)
    total = member.placement.total_replicas
    grouping, comm_group = attributes.pop(_GROUPING, None), attributes.pop(_COMM_GROUP, None)
    if grouping and comm_group:
        raise Error(f"{operation}: setting both attributes {_COMM_GROUP!r} and {_GROUPING!r} is not allowed")
    replicas, stride, size = (
        _of_comm_group(operation, comm_group, total) if comm_group else grouping or (total, 1, total)
    )
    if min(replicas, stride, size) < 1 or replicas % (stride * size):
        raise Error(f"{operation}: groups of {size} replicas with stride {stride} do not divide {replicas} replicas")
    if replicas != total:
        raise Error(f"{operation}: its attributes are for {replicas} replicas, but the program has {total}")
    first = member.index // (stride * size) * stride * size + member.index % stride
    return ReplicaGroup(member, operation, tuple(range(first, first + stride * size, stride)))


def _of_comm_group(operation: str, values: Sequence[int], total: int) -> Tuple[int, int, int]:
    """Return the grouping of a type (0 all, 1 consecutive, 2 orthogonal) and a size."""
    if len(values) != 2 or values[0] not in (0, 1, 2) or (values[0] and values[1] < 1):
        raise Error(f"{operation}: {_COMM_GROUP} is [type 0, 1 or 2, size], not {list(values)}")
    kind, size = values
    return (total, 1, total) if kind == 0 else (total, 1, size) if kind == 1 else (total, max(1, total // size), size)


def _collective_operator(operation: str, attributes: Dict[str, Any]) -> str:
    number = attributes.pop(_OPERATOR, 0)
    name = _NAMES[number] if 0 <= number < len(_NAMES) else "unknown"
    if name not in (*_COMBINE, "Local"):
        raise Error(f"{operation}: the collective operator {number} ({name}) is not one for numbers")
    return name


@built_in_emulation("ReplicatedAllGather", is_flat=True)
def all_gather(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Return the tensors of the group in one dimension; each replica gets its own part of its gradient."""
    return _AllGather.apply(x, _group("ReplicatedAllGather", attributes))  # type: ignore[no-any-return, no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
        ctx.group, ctx.shape = group, x.shape
        return group.gather(x).reshape(-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # PopART's is a ReplicatedReduceScatter with the operator Local: the gradients of the others do not count.
        return gradient.view(ctx.group.size, *ctx.shape)[ctx.group.position].clone(), None


@built_in_emulation("ReplicatedAllReduce")
def all_reduce(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Return the tensors of the group, reduced. As in PopART, no gradient flows back through it."""
    name = _collective_operator("ReplicatedAllReduce", attributes)
    if x.requires_grad and torch.is_grad_enabled():
        _warn_of_no_gradient()
    return _group("ReplicatedAllReduce", attributes).reduce(x.detach(), name)


@functools.lru_cache(maxsize=None)
def _warn_of_no_gradient() -> None:
    logger.warning(
        "PopART's ReplicatedAllReduce has no gradient: what its input depends on is not trained through it. "
        "ReplicatedAllReduceTP has one"
    )


@built_in_emulation("ReplicatedReduceScatter", is_flat=True)
def reduce_scatter(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Return this replica's part of the reduced tensors of the group, in one dimension; the last part may be padded."""
    name = _collective_operator("ReplicatedReduceScatter", attributes)
    attributes.pop("__replicatedTensorSharding", None)
    return _ReduceScatter.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, _group("ReplicatedReduceScatter", attributes), name
    )


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup, name: str) -> torch.Tensor:
        ctx.group, ctx.name, ctx.shape = group, name, x.shape
        part = -(-x.numel() // group.size)
        padded = torch.nn.functional.pad(x.reshape(-1), (0, part * group.size - x.numel()))
        return group.reduce(padded, name).view(group.size, part)[group.position].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.name != "Local":
            raise Error(
                "ReplicatedReduceScatterOp: grad op is only implemented when CollectiveOperator==CollectiveOperator::"
                f"Local, and this one is {ctx.name}"
            )
        gathered = ctx.group.gather(gradient, " (gradient)").reshape(-1)
        return gathered[: ctx.shape.numel()].view(ctx.shape), None, None


@built_in_emulation("ReplicatedAllToAll")
def all_to_all(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    """Return, along dimension 0, the part for this replica of the tensor of each replica of the group."""
    group = _group("ReplicatedAllToAll", attributes)
    if not x.dim() or x.shape[0] % group.size:
        raise Error(f"ReplicatedAllToAll: dimension 0 of {list(x.shape)} is not a multiple of {group.size} replicas")
    return _AllToAll.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group, "")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchanged(gradient, ctx.group, " (gradient)"), None


def _exchanged(x: torch.Tensor, group: ReplicaGroup, direction: str) -> torch.Tensor:
    parts = group.gather(x, direction).view(group.size, group.size, -1)
    return parts[:, group.position].reshape(x.shape)


@built_in_emulation("ReplicatedAllReduceTP")
def all_reduce_tp(x: torch.Tensor, backwards: int = 0, op: str = "sum", **attributes: Any) -> torch.Tensor:
    """Return the sum over the group and pass the gradient on, or with `backwards` the other way round.

    `op` has no effect, as in its C++, which reads `__collectiveOperator` and rejects all but Add.
    """
    if _collective_operator("ReplicatedAllReduceTP", attributes) != "Add":
        raise Error("ReplicatedAllReduceTP: CollectiveOperator::Add is the only one that is implemented")
    group = _group("ReplicatedAllReduceTP", attributes)
    return _AllReduceTP.apply(x, group, bool(backwards))  # type: ignore[no-any-return, no-untyped-call]


class _AllReduceTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup, is_backward: bool) -> torch.Tensor:
        ctx.group, ctx.is_backward = group, is_backward
        if is_backward:
            return x.clone()
        return group.reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        reduced = ctx.group.reduce(gradient, direction=" (gradient)") if ctx.is_backward else gradient
        return reduced, None, None
