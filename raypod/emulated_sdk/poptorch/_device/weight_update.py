"""From the losses of an update's micro-batches to new weights (contract 2.5).

Each replica accumulates gradients over its micro-batches. The sums are combined in one fixed tree over the replicas of
all processes and scaled, and torch's optimizer updates the weights. So the result depends on the replicas only, not on
how they are spread over threads and processes.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Optional

import torch
from _emulated_gradient_sum import GradientSum, Placement

from poptorch._errors import Error
from poptorch._optimizers.device_optimizer import DeviceOptimizer
from poptorch.enums import ReductionType
from poptorch.options import Options

from .memory import DeviceMemory
from .replica_threads import ReplicaThreads


class NoUpdate:
    """Inference: weights stay as they are."""

    def backward(self, loss: Optional[torch.Tensor]) -> None:
        """Nothing to differentiate."""

    def apply(self, threads: ReplicaThreads) -> None:
        """Nothing to update."""

    def discard_gradients(self) -> None:
        """Nothing to discard."""


class WeightUpdate(NoUpdate):
    """Training: `backward` after each micro-batch, then `apply`.

    Every parameter that requires a gradient takes part in the reduction, in every process alike. Where no replica has
    computed one in this update, those that compiling found in the graph, named by `in_graph`, get a gradient of zero:
    they belong to a branch not taken. Others get none, as in torch: what hides them from the graph hides whether they
    are used at all.
    """

    def __init__(
        self, memory: DeviceMemory, optimizer: DeviceOptimizer, options: Options, in_graph: FrozenSet[str]
    ) -> None:
        self.optimizer = optimizer
        self._memory = memory
        placement = placement_of(options)
        terms = _terms(options, placement)
        # Dividing by a power of two is exact wherever it is done; on the loss it costs no pass over the gradients.
        is_exact = terms & (terms - 1) == 0
        self._loss_terms, self._gradient_terms = (terms, 1) if is_exact else (1, terms)
        names = [name for name, parameter in optimizer.parameters.items() if parameter.requires_grad]
        self._trained = [[replica.parameters[name] for name in names] for replica in memory.replicas]
        self._is_in_graph = torch.tensor([float(name in in_graph) for name in names])
        # A single replica has nobody to combine with. Others also count who has a gradient of each parameter.
        like = [*self._trained[0], self._is_in_graph]
        self._sum = GradientSum(like, placement) if placement.total_replicas > 1 else None

    def backward(self, loss: Optional[torch.Tensor]) -> None:
        """Accumulate the gradients of one micro-batch, from its final marked loss."""
        if loss is None:
            raise Error("Couldn't find a loss in graph! forward marked one when it was compiled, but not in this call")
        if loss.requires_grad:
            scaling = self.optimizer.hyperparameters.loss_scaling / self._loss_terms
            torch.autograd.backward(loss, None if scaling == 1.0 else torch.full_like(loss, scaling))

    def apply(self, threads: ReplicaThreads) -> None:
        """Combine the gradients of all replicas and update the weights."""
        if self._sum is None:
            self._complete()
        else:
            self._combine(self._sum)
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

    def _complete(self) -> None:
        for parameter, is_in_graph in zip(self._trained[0], self._is_in_graph.tolist()):
            if parameter.grad is None and is_in_graph:
                parameter.grad = torch.zeros_like(parameter)

    def _combine(self, gradient_sum: GradientSum) -> None:
        """Give replica 0, whose parameters the optimizer holds, the sums as gradients."""
        with torch.no_grad():
            *sums, replicas = gradient_sum([_gradients(replica) for replica in self._trained])
            if self._is_scaled:  # in place, and the sums may lie in memory that others read
                sums = [total.clone() for total in sums]
        for parameter, total, having in zip(self._trained[0], sums, (replicas + self._is_in_graph).tolist()):
            parameter.grad = total if having else None

    @property
    def _is_scaled(self) -> bool:
        values = self.optimizer.hyperparameters
        return self._gradient_terms * values.loss_scaling != 1.0 or values.max_grad_norm != float("inf")

    def _scale(self, part: int) -> None:
        self.optimizer.scale(part, 1.0 / (self._gradient_terms * self.optimizer.hyperparameters.loss_scaling))

    def _scale_and_step(self, part: int) -> None:
        self._scale(part)
        self.optimizer.step(part)


def _gradients(parameters: List[torch.nn.Parameter]) -> List[Optional[torch.Tensor]]:
    """A replica's gradients, and last which of them there are."""
    gradients = [parameter.grad for parameter in parameters]
    return [*gradients, torch.tensor([float(gradient is not None) for gradient in gradients])]


def placement_of(options: Options) -> Placement:
    """Where the local replicas stand among all, as the options have it."""
    distributed = options.Distributed
    return Placement(options.replication_factor, distributed.processId, distributed.numProcesses)


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
