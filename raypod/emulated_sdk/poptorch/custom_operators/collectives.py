"""PopART's collective operators, and the exchange of tensors between the replicas of all processes within a pass.

Programs call the operators by `poptorch.custom_op`. Attributes, sizes and gradients are those of PopART's sources.
`ReplicatedAllReduceTP` and `ReplicatedAllToAll` are those of poptorch-experimental-addons, which tensor-parallel
programs share.

Inferred: the order of the additions (the tree of the gradient reduction, so that the placement does not matter), zeros
as the padding of a ReplicatedReduceScatter, and that a grouping for another number of replicas is an Error.

The replicas of a process run in threads. The last of them that reaches a collective operator exchanges the tensors of
all with the other processes; the others wait for it. All replicas run the same program, so all of them reach the same
operators in the same order, whatever their groups; where they do not, it is an error for all of them.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from _pod import reduce, wires
from _pod.gradient_sum import Placement
from _pod.rendezvous import timeout_s

from poptorch.custom_operators.registry import built_in_emulation
from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.python_state import suspended_forward

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


_local = threading.local()


class ReplicaExchange:
    """Lets the local replicas of one program exchange tensors with all others.

    Attributes:
        is_used: whether the compiled forward exchanges tensors.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.is_used = False
        self._condition = threading.Condition()
        self._begin()

    def _begin(self) -> None:
        self._rows: Dict[int, torch.Tensor] = {}  # of the present round, by local replica
        self._operation = ""  # that the replicas of the present round call
        self._table: Optional[torch.Tensor] = None  # the result of the last round
        self._round = 0
        self._ended = 0  # local replicas that have left their pass
        self._failure: Optional[BaseException] = None

    def compiling(self) -> Member:
        """Return the context of a compilation, in which every replica is taken to have the same tensors."""
        return Member(self, None)

    def around(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """Return `work(local replica)` as a function in which the replicas can exchange tensors."""
        if not self.is_used:
            return work
        self._begin()

        def member(replica: int) -> None:
            with Member(self, replica):
                work(replica)

        return member

    def gather(self, row: torch.Tensor, operation: str, replica: Optional[int]) -> torch.Tensor:
        """Return the tensors of all replicas of all processes, [replicas, *shape], read-only.

        Args:
            row: of the same shape and dtype on all replicas.
            operation: what the replica calls; the same on all.
            replica: the local replica; None while a model compiles.

        Raises:
            poptorch.Error: the replicas call different operations.
            PeerFailed: a process is lost, fails or does not respond in time.
        """
        row = row.detach().contiguous()
        if replica is None:
            return row.expand(self.placement.total_replicas, *row.shape)
        operation = f"{operation} of {str(row.dtype).replace('torch.', '')}{list(row.shape)}"
        with self._condition:
            try:
                self._enter(row, operation, replica)
                if len(self._rows) == self.placement.local_replicas:
                    self._complete(operation)
                else:
                    self._wait(operation)
            except BaseException as error:
                self.fail(error)
                raise
            assert self._table is not None
            return self._table

    def leave(self) -> None:
        """End the part of one local replica."""
        with self._condition:
            self._ended += 1
            if self._rows:  # those that wait would wait for ever
                self.fail(Error(f"A replica ended its pass while others wait for it in {self._operation}"))
            if self._ended == self.placement.local_replicas:
                self._begin()  # a failure would keep the program alive

    def fail(self, error: BaseException) -> None:
        """Let all replicas that wait, or come later, raise this error, and the other processes a PeerFailed."""
        with self._condition:
            if self._failure is None:
                self._failure = error
                self._condition.notify_all()
                if self.placement.num_processes > 1:
                    wires.abandon(
                        reduce.GROUP,
                        self.placement.process_id,
                        self.placement.num_processes,
                        "a replica of this process failed",
                    )

    def close_connections(self) -> None:
        """Close broken connections to other processes: the next call opens new ones."""
        if self.is_used:
            wires.disconnect_broken(reduce.GROUP)

    def _enter(self, row: torch.Tensor, operation: str, replica: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise Error(f"A replica calls {operation} after another has ended its pass: all must call it")
        if self._rows and operation != self._operation:
            raise Error(f"A replica calls {operation}, another {self._operation}: all must call the same operators")
        self._rows[replica], self._operation = row, operation

    def _complete(self, operation: str) -> None:
        local = torch.stack([self._rows[replica] for replica in range(self.placement.local_replicas)])
        self._rows = {}
        self._table = self._of_all_processes(local, operation)
        self._round += 1
        self._condition.notify_all()

    def _of_all_processes(self, local: torch.Tensor, operation: str) -> torch.Tensor:
        placement = self.placement
        if placement.num_processes == 1:
            return local
        group = reduce.join(placement.process_id, placement.num_processes)
        called = [number for (number,) in group.gather_numbers([zlib.crc32(operation.encode())])]
        if len(set(called)) > 1:
            raise Error(f"This process calls {operation}, but others call other operators: all must call the same")
        return group.gather(local).flatten(0, 1)

    def _wait(self, operation: str) -> None:
        present, deadline = self._round, time.monotonic() + timeout_s()
        while self._round == present and self._failure is None:
            if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                raise Error(f"{operation}: other replicas did not call it within {timeout_s():g} s")
        if self._round == present and self._failure is not None:
            raise self._failure


class Member:
    """Context in which a thread runs one replica of an `exchange`; `replica` is None for a compilation."""

    def __init__(self, exchange: ReplicaExchange, replica: Optional[int]) -> None:
        self.exchange, self._replica = exchange, replica

    def __enter__(self) -> Member:
        self._outer = getattr(_local, "member", None)
        _local.member = self
        return self

    def __exit__(self, kind: object, error: Optional[BaseException], *rest: object) -> None:
        _local.member = self._outer
        if self._replica is None:
            return
        if error is not None:
            self.exchange.fail(error)
        self.exchange.leave()

    @property
    def placement(self) -> Placement:
        """The position of the local replicas among those of all processes."""
        return self.exchange.placement

    @property
    def index(self) -> int:
        """Global index of this replica; during a compilation that of the first local one."""
        return self.placement.first_replica + (self._replica or 0)

    def gather(self, row: torch.Tensor, operation: str) -> torch.Tensor:
        """Return the tensors of all replicas; see `ReplicaExchange.gather`."""
        with suspended_forward():
            return self.exchange.gather(row, operation, self._replica)


def current(operation: str) -> Member:
    """Return the replica that this thread runs, for an exchange in its forward or backward pass.

    Raises:
        poptorch.Error: the compiled forward has no exchange.
    """
    member: Optional[Member] = getattr(_local, "member", None)
    if member is None:
        raise Error(f"{operation} was not part of the forward when the model was compiled")
    member.exchange.is_used = True
    return member
