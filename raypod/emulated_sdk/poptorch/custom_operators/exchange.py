"""The exchange of tensors between the replicas of all processes within a forward or backward pass.

The replicas of a process run in threads. The last of them that reaches a collective operator exchanges the tensors of
all with the other processes; the others wait for it. All replicas run the same program, so all of them reach the same
operators in the same order, whatever their groups; where they do not, it is an error for all of them.
"""

from __future__ import annotations

import threading
import time
import zlib
from typing import Callable, Dict, Optional

import torch
from _pod import reduce, wires
from _pod.gradient_sum import Placement

from poptorch.errors import Error
from poptorch.python_state import suspended_forward

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
        present, deadline = self._round, time.monotonic() + wires.timeout_s()
        while self._round == present and self._failure is None:
            if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                raise Error(f"{operation}: other replicas did not call it within {wires.timeout_s():g} s")
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
