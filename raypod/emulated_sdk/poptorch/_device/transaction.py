"""A call as one transaction: its effects on the device are kept as a whole, or not at all.

Where a peer is lost in the middle of a call, a program can so be sure of what it holds: the state after its last
complete call. [On real IPUs a failed call leaves the device in no defined state, and a program reads nothing back.]

Weights and optimizer state are the same in every process. Buffers (running statistics) are each replica's own, and
would be lost with its process. So every process keeps the buffers of ALL replicas, as they were after the last complete
call: who changed some says so beside its gradients, and these travel before the weights change.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch
from _emulated_gradient_sum import Placement
from _emulated_pod import as_bytes

from poptorch._device.memory import DeviceMemory
from poptorch._device.replica import Replica
from poptorch._errors import Error
from poptorch._optimizers.device_optimizer import DeviceOptimizer

Gather = Callable[[torch.Tensor], torch.Tensor]


class NoTransaction:
    """Inference: there is nothing to lose but buffers that a program should not change."""

    def begin(self) -> None:
        """Nothing to remember."""

    def roll_back(self) -> None:
        """Nothing to put back."""

    def commit(self) -> None:
        """Nothing to keep."""

    def note_upload(self) -> None:
        """Nothing to compare with."""


class CallTransaction(NoTransaction):
    """Weights, optimizer state, buffers and micro-batch counters of a training program.

    A single update changes the weights last of all, when nothing can fail any more; only calls of several
    (`keeps_weights`) need a copy of them.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        optimizer: DeviceOptimizer,
        replicas: List[Replica],
        buffers: ReplicaBuffers,
        keeps_weights: bool,
    ) -> None:
        self._memory, self._optimizer, self._replicas, self._buffers = memory, optimizer, replicas, buffers
        self._keeps_weights = keeps_weights
        self._micro_batches: List[int] = []
        self._weights: List[torch.Tensor] = []
        self._optimizer_state: List[Any] = []

    def begin(self) -> None:
        """Remember what the call is going to change."""
        self._micro_batches = [replica.micro_batches for replica in self._replicas]
        if self._keeps_weights:
            with torch.no_grad():
                self._weights = [parameter.clone() for parameter in self._memory.parameters.values()]
            self._optimizer_state = self._optimizer.snapshot()

    def roll_back(self) -> None:
        """Put it all back."""
        self._buffers.roll_back()
        for replica, micro_batches in zip(self._replicas, self._micro_batches):
            replica.micro_batches = micro_batches
        if self._keeps_weights:
            with torch.no_grad():
                for parameter, value in zip(self._memory.parameters.values(), self._weights):
                    parameter.copy_(value)
            self._optimizer.restore(self._optimizer_state)

    def commit(self) -> None:
        """The call is complete."""
        self._buffers.commit()

    def note_upload(self) -> None:
        """The host has set the buffers."""
        self._buffers.take_local()


class ReplicaBuffers:
    """The floating point buffers of all replicas of all processes, as they were after the last complete call.

    Those that no replica has ever changed are equal everywhere, and kept once.
    """

    def __init__(self, memory: DeviceMemory, placement: Placement) -> None:
        self._replicas = [replica.buffers for replica in memory.replicas]
        self._placement = placement
        self._names = list(self._replicas[0])
        self._moving = [False] * len(self._names)
        self._kept: Dict[str, torch.Tensor] = {}
        self._arrived: Optional[Dict[str, torch.Tensor]] = None
        self.take_local()

    def take_local(self) -> None:
        """The buffers here are what counts now. Of other processes' nothing is known: taken to be as replica 0's here,
        until their next call.
        """
        total = self._placement.total_replicas
        for name, moving in zip(self._names, self._moving):
            row = self._replicas[0][name].detach().clone().unsqueeze(0)
            self._kept[name] = row.expand(total, *row.shape[1:])
            if moving:
                self._put_local(self._kept, name)

    def changed(self, replica: int, is_last: bool) -> torch.Tensor:
        """Which buffers this replica has changed in this call, or any replica before: float32 [buffers], 1 for yes.

        Asked in the last update of a call; in the others nothing is looked at.
        """
        first = self._placement.first_replica
        if is_last:
            flags = [
                float(moving or not torch.equal(self._replicas[replica][name], self._kept[name][first + replica]))
                for name, moving in zip(self._names, self._moving)
            ]
            return torch.tensor(flags, dtype=torch.float32)
        return torch.zeros(len(self._names))

    def exchange(self, changed: List[float], gather: Gather) -> None:
        """Collect from all processes the buffers that any replica has changed, by the sums of `changed`.

        RuntimeError if a peer is lost or silent.
        """
        self._moving = [moving or bool(count) for moving, count in zip(self._moving, changed)]
        names = [name for name, moving in zip(self._names, self._moving) if moving]
        self._arrived = {}
        if not names:
            return
        local = {name: torch.stack([replica[name].detach() for replica in self._replicas]) for name in names}
        row = torch.cat([as_bytes(local[name]) for name in names])
        table = gather(row)  # [processes, bytes]
        start = 0
        for name in names:
            values, stop = local[name], start + local[name].numel() * local[name].element_size()
            columns = table[:, start:stop].contiguous()
            shape = (self._placement.total_replicas, *values.shape[1:])
            self._arrived[name] = columns.flatten().view(values.dtype).view(shape)
            start = stop

    def commit(self) -> None:
        """Keep what the last exchange brought."""
        self._kept.update(self._arrived or {})
        self._arrived = None

    def roll_back(self) -> None:
        """Put the local replicas' buffers back."""
        self._arrived = None
        self._write_local()

    def state(self) -> Dict[str, torch.Tensor]:
        """A copy: for every buffer [total replicas, *its shape]."""
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load(self, state: Dict[str, torch.Tensor]) -> None:
        """Take over a `state()` of a program with the same buffers and as many replicas. Error for any other."""
        for name in {**self._kept, **state}:
            wanted = tuple(self._kept[name].shape) if name in self._kept else "no such buffer"
            given = tuple(state[name].shape) if name in state else "no such buffer"
            if wanted != given:
                raise Error(f"The state of the replicas does not fit: {name!r} is {given}, and here {wanted}")
        for name in self._names:
            self._kept[name] = state[name].to(self._kept[name].dtype, copy=True)
        self._write_local()

    def _write_local(self) -> None:
        first = self._placement.first_replica
        with torch.no_grad():
            for index, buffers in enumerate(self._replicas):
                for name, buffer in buffers.items():
                    buffer.copy_(self._kept[name][first + index])

    def _put_local(self, kept: Dict[str, torch.Tensor], name: str) -> None:
        kept[name] = kept[name].clone()
        for index, buffers in enumerate(self._replicas):
            kept[name][self._placement.first_replica + index] = buffers[name].detach()
