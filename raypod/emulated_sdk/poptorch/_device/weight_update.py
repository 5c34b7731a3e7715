"""From the losses of an update's micro-batches to new weights (contract 2.5).

Each replica accumulates gradients over its micro-batches. The sums are combined in one fixed tree over the replicas of
all processes and scaled, and torch's optimizer updates the weights. So the result depends on the replicas only, not on
how they are spread over threads and processes.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

import torch
from _emulated_gradient_sum import GradientSum, Placement

from poptorch._device.half_storage import HalfAccumulator, HalfWeights
from poptorch._device.memory import DeviceMemory
from poptorch._device.replica_threads import ReplicaThreads
from poptorch._device.transaction import ReplicaBuffers
from poptorch._errors import Error
from poptorch._optimizers.device_optimizer import DeviceOptimizer
from poptorch._optimizers.hyperparameters import Hyperparameters
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.options import Options


class NoUpdate:
    """Inference: weights stay as they are.

    `loss_terms` is what a loss is divided by before its gradients are computed.
    """

    loss_terms = 1

    def backward(self, replica: int, loss: Optional[torch.Tensor]) -> None:
        """Nothing to differentiate."""

    def apply(self, threads: ReplicaThreads, is_last: bool) -> None:
        """Nothing to update."""

    def discard_gradients(self) -> None:
        """Nothing to discard."""

    def abandon(self) -> None:
        """Nobody waits."""

    def let_go(self) -> None:
        """There are no wires."""


class WeightUpdate(NoUpdate):
    """Training: `backward` after each micro-batch, then `apply`.

    Every parameter that requires a gradient takes part in the reduction, in every process alike. Where no replica has
    computed one in this update, those that compiling found in the graph, named by `in_graph`, get a gradient of zero:
    they belong to a branch not taken. Others get none, as in torch: what hides them from the graph hides whether they
    are used at all.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        optimizer: DeviceOptimizer,
        options: Options,
        in_graph: FrozenSet[str],
        count_micro_batches: Callable[[], int],
        buffers: ReplicaBuffers,
    ) -> None:
        self.optimizer = optimizer
        self._memory = memory
        self._buffers = buffers
        placement = placement_of(options)
        self._half_weights = HalfWeights(memory, options, count_micro_batches)
        self._accumulators = _half_accumulators(memory, optimizer.hyperparameters, options)
        self.loss_terms, self._gradient_terms = _terms(options, placement, self._accumulators)
        names = [name for name, parameter in optimizer.parameters.items() if parameter.requires_grad]
        self._trained = [[replica.parameters[name] for name in names] for replica in memory.replicas]
        self._is_in_graph = torch.tensor([float(name in in_graph) for name in names])
        # A single replica has nobody to combine with. Others also count who has a gradient of each parameter, and who
        # has changed each buffer.
        like = [*self._trained[0], self._is_in_graph, buffers.changed(0, is_last=False)]
        self._sum = GradientSum(like, placement) if placement.total_replicas > 1 else None

    def backward(self, replica: int, loss: Optional[torch.Tensor]) -> None:
        """Accumulate the gradients of one micro-batch, from its final marked loss."""
        if loss is None:
            raise Error("Couldn't find a loss in graph! forward marked one when it was compiled, but not in this call")
        if not loss.requires_grad:
            return
        scaling = self.optimizer.hyperparameters.loss_scaling / self.loss_terms
        with self._accumulators[replica] if self._accumulators else contextlib.nullcontext():
            torch.autograd.backward(loss, None if scaling == 1.0 else torch.full_like(loss, scaling))

    def apply(self, threads: ReplicaThreads, is_last: bool) -> None:
        """Combine the gradients of all replicas and update the weights; in the last update of a call buffers, too.

        Up to the first weight that changes this waits for other processes, and from there on for none.
        """
        if self._sum is None:
            self._complete()
            if is_last:
                self._buffers.exchange(self._buffers.changed(0, is_last).tolist(), _of_one_process)
        else:
            self._combine(self._sum, is_last)
        if self.optimizer.hyperparameters.max_grad_norm == float("inf"):
            threads.each(self._scale_and_step)
        else:
            threads.each(self._scale)
            self.optimizer.clip()
            threads.each(self.optimizer.step)
        self._half_weights.round()
        self.discard_gradients()

    def abandon(self) -> None:
        """Give up in the middle of a call: the other processes are told."""
        if self._sum is not None:
            self._sum.abandon()

    def let_go(self) -> None:
        """Forget wires that are broken: the next call joins new ones."""
        if self._sum is not None:
            self._sum.let_go()

    def discard_gradients(self) -> None:
        """Begin anew: after an update, and after an error in the middle of one."""
        for accumulator in self._accumulators:
            accumulator.start_again()
        for memory in self._memory.replicas:
            for parameter in memory.parameters.values():
                parameter.grad = None

    def _complete(self) -> None:
        for parameter, is_in_graph in zip(self._trained[0], self._is_in_graph.tolist()):
            if parameter.grad is None and is_in_graph:
                parameter.grad = torch.zeros_like(parameter)

    def _combine(self, gradient_sum: GradientSum, is_last: bool) -> None:
        """Give replica 0, whose parameters the optimizer holds, the sums as gradients."""
        with torch.no_grad():
            *sums, replicas, changed = gradient_sum(
                [
                    [*_gradients(replica), self._buffers.changed(index, is_last)]
                    for index, replica in enumerate(self._trained)
                ]
            )
            if is_last:
                self._buffers.exchange(changed.tolist(), gradient_sum.gather)
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


def _of_one_process(row: torch.Tensor) -> torch.Tensor:
    return row.unsqueeze(0)


def _gradients(parameters: List[torch.nn.Parameter]) -> List[Optional[torch.Tensor]]:
    """A replica's gradients, and last which of them there are."""
    gradients = [parameter.grad for parameter in parameters]
    return [*gradients, torch.tensor([float(gradient is not None) for gradient in gradients])]


def placement_of(options: Options) -> Placement:
    """Where the local replicas stand among all, as the options have it."""
    distributed = options.Distributed
    return Placement(options.replication_factor, distributed.processId, distributed.numProcesses)


def reduction_strategy(options: Options, values: Hyperparameters) -> MeanReductionStrategy:
    """When a mean divides: as the options say; by default after the sum, unless that may leave the range of half."""
    training: Any = options.Training
    if training.has_chosen_strategy or not values.accumulates_in_half or values.is_combined:
        return MeanReductionStrategy(training.mean_accumulation_and_replication_reduction_strategy)
    return MeanReductionStrategy.Running


def _half_accumulators(memory: DeviceMemory, values: Hyperparameters, options: Options) -> List[HalfAccumulator]:
    """One for each replica where gradients are summed up in half; a single micro-batch sums nothing up."""
    training: Any = options.Training
    if not values.accumulates_in_half or training.gradient_accumulation == 1:
        return []
    is_mean = training.accumulation_and_replication_reduction_type == ReductionType.Mean
    is_running = is_mean and reduction_strategy(options, values) == MeanReductionStrategy.Running
    return [HalfAccumulator(list(replica.parameters.values()), is_running) for replica in memory.replicas]


def _terms(options: Options, placement: Placement, accumulators: List[HalfAccumulator]) -> Tuple[int, int]:
    """By what an update's mean divides the loss, and by what the gradients; 1 and 1 for a sum."""
    training: Any = options.Training
    if training.accumulation_and_replication_reduction_type == ReductionType.Sum:
        return 1, 1
    if accumulators:
        # What is rounded to half has to have the size that it has on the device.
        steps = 1 if accumulators[0].is_running else int(training.gradient_accumulation)
        return 1, steps * placement.total_replicas
    terms = int(training.gradient_accumulation) * placement.total_replicas
    # Dividing by a power of two is exact wherever it is done; on the loss it costs no pass over the gradients.
    is_exact = terms & (terms - 1) == 0
    return (terms, 1) if is_exact else (1, terms)


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
