"""From the losses of an update's micro-batches to new weights (contract 2.5).

Each replica accumulates gradients over its micro-batches. The sums are combined in one fixed tree over the replicas of
all processes and scaled, and torch's optimizer updates the weights. So the result depends on the replicas only, not on
how they are spread over threads and processes.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
from _emulated_gcl import tree_sum_

from poptorch._errors import Error
from poptorch._optimizers.device_optimizer import DeviceOptimizer
from poptorch.enums import ReductionType
from poptorch.options import Options

from .memory import DeviceMemory
from .replica_threads import ReplicaThreads

# Every gradient begins on a cache line, as tensors of their own do: kernels may round differently elsewhere.
_ALIGNMENT = 64 // 4


class Placement(NamedTuple):
    """Where the local replicas stand among all."""

    local_replicas: int
    process_id: int
    num_processes: int

    @classmethod
    def of(cls, options: Options) -> Placement:
        """As the options have it."""
        distributed = options.Distributed
        return cls(options.replication_factor, distributed.processId, distributed.numProcesses)

    @property
    def total_replicas(self) -> int:
        """Replicas of all processes."""
        return self.local_replicas * self.num_processes

    @property
    def first_replica(self) -> int:
        """Global index of the first local replica."""
        return self.local_replicas * self.process_id


class NoUpdate:
    """Inference: weights stay as they are."""

    def backward(self, loss: Optional[torch.Tensor]) -> None:
        """Nothing to differentiate."""

    def collect(self, replica: int) -> None:
        """Nothing to collect."""

    def apply(self, threads: ReplicaThreads) -> None:
        """Nothing to update."""

    def discard_gradients(self) -> None:
        """Nothing to discard."""


class WeightUpdate(NoUpdate):
    """Training: `backward` after each micro-batch, `collect` once per replica, then `apply`.

    `trained` names the parameters that the loss depends on; the others get no gradient, as in torch.
    """

    def __init__(
        self, memory: DeviceMemory, optimizer: DeviceOptimizer, options: Options, trained: FrozenSet[str]
    ) -> None:
        self.optimizer = optimizer
        self._memory = memory
        self._placement = Placement.of(options)
        terms = _terms(options, self._placement)
        # Dividing by a power of two is exact wherever it is done; on the loss it costs no pass over the gradients.
        is_exact = terms & (terms - 1) == 0
        self._loss_terms, self._gradient_terms = (terms, 1) if is_exact else (1, terms)
        names = [name for name in optimizer.parameters if name in trained]
        # A single replica has nobody to combine with: torch's own gradient tensors serve, and nothing is copied.
        is_alone = self._placement.total_replicas == 1
        self._gradients = [] if is_alone else [_FlatGradients(memory, replica, names) for replica in _local(memory)]

    def backward(self, loss: Optional[torch.Tensor]) -> None:
        """Accumulate the gradients of one micro-batch, from its final marked loss."""
        if loss is None:
            raise Error("Couldn't find a loss in graph! forward marked one when it was compiled, but not in this call")
        if loss.requires_grad:
            scaling = self.optimizer.hyperparameters.loss_scaling / self._loss_terms
            torch.autograd.backward(loss, None if scaling == 1.0 else torch.full_like(loss, scaling))

    def collect(self, replica: int) -> None:
        """Put a replica's gradients side by side, ready to be combined."""
        if self._gradients:
            self._gradients[replica].collect()

    def apply(self, threads: ReplicaThreads) -> None:
        """Combine the gradients of all replicas and update the weights."""
        if self._gradients:
            self._reduce()
        if self.optimizer.hyperparameters.max_grad_norm == float("inf"):
            threads.each(self._scale_and_step)
        else:
            threads.each(self._scale)
            self.optimizer.clip()
            threads.each(self.optimizer.step)
        self._memory.round_half_parameters()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Begin anew: after an update, and after an error in the middle of one."""
        for memory in self._memory.replicas:
            for parameter in memory.parameters.values():
                parameter.grad = None

    def _reduce(self) -> None:
        tree_sum_(
            [gradients.flat for gradients in self._gradients],
            replica_offset=self._placement.first_replica,
            total_replicas=self._placement.total_replicas,
            process_id=self._placement.process_id,
            num_processes=self._placement.num_processes,
        )
        self._gradients[0].hand_out()

    def _scale(self, part: int) -> None:
        self.optimizer.scale(part, 1.0 / (self._gradient_terms * self.optimizer.hyperparameters.loss_scaling))

    def _scale_and_step(self, part: int) -> None:
        self._scale(part)
        self.optimizer.step(part)


class _FlatGradients:
    """The gradients of one replica in one tensor, parameter after parameter."""

    def __init__(self, memory: DeviceMemory, replica: int, names: List[str]) -> None:
        parameters = [memory.replicas[replica].parameters[name] for name in names]
        starts, length = _starts(parameters)
        self.flat = torch.zeros(length)
        self._pairs = [
            # With the strides of the parameter: fused kernels walk through both side by side.
            (parameter, self.flat.as_strided(parameter.shape, parameter.stride(), start))
            for parameter, start in zip(parameters, starts)
        ]

    def collect(self) -> None:
        """Copy the gradients in; those that this replica did not compute are zero."""
        with torch.no_grad():
            for parameter, place in self._pairs:
                if parameter.grad is None:
                    place.zero_()
                else:
                    place.copy_(parameter.grad)
                    parameter.grad = None

    def hand_out(self) -> None:
        """Make them the gradients of the parameters."""
        for parameter, place in self._pairs:
            parameter.grad = place


def _starts(parameters: Sequence[torch.Tensor]) -> Tuple[List[int], int]:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _local(memory: DeviceMemory) -> range:
    return range(len(memory.replicas))


def _terms(options: Options, placement: Placement) -> int:
    """Over how many micro-batches an update takes the mean; 1 for a sum."""
    training: Any = options.Training
    if training.accumulation_and_replication_reduction_type == ReductionType.Sum:
        return 1
    return int(training.gradient_accumulation) * placement.total_replicas


def device_groups(
    optimizer: torch.optim.Optimizer, host: torch.nn.Module, memory: DeviceMemory
) -> List[Dict[str, torch.nn.Parameter]]:
    """For every parameter group of a host optimizer, the device's parameters by name.

    Parameters of the optimizer that are not the model's are left out.
    """
    names = {id(parameter): name for name, parameter in host.named_parameters()}
    return [
        {names[id(p)]: memory.parameters[names[id(p)]] for p in group["params"] if id(p) in names}
        for group in optimizer.param_groups
    ]
