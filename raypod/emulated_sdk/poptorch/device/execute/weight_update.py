"""The weight update: from the losses of an update's micro-batches to new weights.

Each replica accumulates gradients over its micro-batches. The sums are reduced over the replicas of all processes in
one fixed tree and scaled, and torch's optimizer updates the weights. So the result does not depend on how replicas are
distributed over threads and processes.
"""

from __future__ import annotations

import collections
import contextlib
import math
from typing import Any, Callable, Deque, Dict, FrozenSet, List, Optional, Tuple

import numpy as np
import torch
from _pod import telemetry
from _pod.gradient_sum import GradientSum, Placement

from poptorch.device.compile.memory import DeviceMemory, stacked
from poptorch.device.execute.calls import ReplicaBuffers, Scales
from poptorch.device.execute.replica import ReplicaThreads
from poptorch.device.kernels import Accumulating
from poptorch.device.kernels.numerics import HalfAccumulator, HalfWeights, LossScaleUpdates
from poptorch.device_mode import apply_averages, discard_averages
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.errors import Error
from poptorch.optimizers.device_optimizer import DeviceOptimizer
from poptorch.optimizers.hyperparameters import Hyperparameters
from poptorch.options import Options


class NoUpdate:
    """The update of an inference program, whose weights do not change: does nothing."""

    @property
    def scales(self) -> Scales:
        """The scaling of the loss, and of anchored gradients."""
        return Scales(1.0, 1.0)

    def backward(self, replica: int, loss: Optional[torch.Tensor]) -> None:
        """Run the backward pass of one micro-batch."""

    def apply(self, threads: ReplicaThreads, is_last: bool) -> None:
        """Update the weights."""

    def discard_gradients(self) -> None:
        """Discard the accumulated gradients."""

    def abort(self) -> None:
        """End a failed call."""

    def close_connections(self) -> None:
        """Close broken connections to other processes."""


class WeightUpdate(NoUpdate):
    """Training: call `backward` after each micro-batch, then `apply`.

    Every parameter that requires a gradient takes part in the reduction, in every process alike. If no replica computed
    a gradient of a parameter in this update, it is zero if the parameter is in `in_graph` (the compilation found it in
    the graph, so a branch was not taken), else None, as in torch. If the model `has_half` tensors, a mean divides the
    gradients: half gradients of a divided loss can underflow.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        optimizer: DeviceOptimizer,
        options: Options,
        in_graph: FrozenSet[str],
        count_micro_batches: Callable[[], int],
        buffers: ReplicaBuffers,
        has_half: bool,
    ) -> None:
        self.optimizer = optimizer
        self.measures_gradients = False
        self.gradient_norms: Deque[float] = collections.deque(maxlen=options.device_iterations)  # of the last updates
        self._memory = memory
        self._buffers = buffers
        placement = placement_of(options)
        self._half_weights = HalfWeights(memory.half_weights, options, count_micro_batches)
        self._accumulators = _half_accumulators(memory, optimizer.hyperparameters, options)
        self._loss_terms, self._gradient_terms = _terms(options, placement, self._accumulators, has_half)
        names = [name for name, parameter in optimizer.parameters.items() if parameter.requires_grad]
        self._names = names
        self._first_replica = placement.first_replica
        self._weights = [memory.updated[name] for name in names]
        self._trained = [[replica.updated[name] for name in names] for replica in memory.replicas]
        self._half = [
            [
                (parameter, updated)
                for parameter, updated in zip(replica.parameters.values(), replica.updated.values())
                if updated is not parameter
            ]
            for replica in memory.replicas
        ]
        self._is_in_graph = torch.tensor([float(name in in_graph) for name in names])
        self._loss_scale: Optional[LossScaleUpdates] = None
        if optimizer.loss_scale_update_factor is not None and has_half:
            is_mean = bool(self._accumulators) and self._accumulators[0].is_running
            steps = 1 if is_mean else int(options.Training.gradient_accumulation)
            self._loss_scale = LossScaleUpdates(options, steps, count_micro_batches)
            self._is_in_graph = torch.cat((self._is_in_graph, torch.zeros(2)))  # the counts of gradients
        # Besides the gradients the reduction counts the replicas that have a gradient of each parameter, and those that
        # changed each buffer. A single replica needs no reduction.
        like = [*self._weights, self._is_in_graph, buffers.changed(0, is_last=False)]
        self._sum = GradientSum(like, placement) if placement.total_replicas > 1 else None

    @property
    def scales(self) -> Scales:
        return Scales(self.optimizer.loss_scaling, self._loss_terms)

    def backward(self, replica: int, loss: Optional[torch.Tensor]) -> None:
        """Accumulate the gradients of one micro-batch's final loss."""
        if loss is None:
            raise Error("Couldn't find a loss in graph! forward marked one when it was compiled, but not in this call")
        if not loss.requires_grad:
            return
        scaling = self.optimizer.loss_scaling / self._loss_terms
        with self._accumulators[replica] if self._accumulators else contextlib.nullcontext(), Accumulating():
            # Not as the gradient of `backward`: to check that, torch imports sympy, half a second in each process.
            torch.autograd.backward(loss if scaling == 1.0 else loss * torch.full_like(loss, scaling))
            self._accumulate_half(replica)

    def apply(self, threads: ReplicaThreads, is_last: bool) -> None:
        """Reduce the gradients over all replicas and update the weights; in a call's last update exchange buffers, too.

        All waits for other processes come before the first weight changes.
        """
        if self._sum is None:
            counts = self._complete()
            if is_last:
                self._buffers.exchange(self._buffers.changed(0, is_last).tolist(), lambda row: row.unsqueeze(0))
        else:
            counts = self._reduce(self._sum, is_last)
        apply_averages(self._memory.replicas[0].parameters, self._memory.updated)
        if self.optimizer.hyperparameters.max_grad_norm == float("inf") and not self.measures_gradients:
            threads.each("update", self._scale_and_step)
        else:
            threads.each("scaling", self._scale)
            if self.measures_gradients:
                self.gradient_norms.append(_norm([parameter.grad for parameter in self._weights]))
            self.optimizer.clip()
            threads.each("update", self.optimizer.step)
        self._half_weights.round()
        if self._loss_scale is not None:
            self.optimizer.update_loss_scale(self._loss_scale.factor(*counts))
        self.discard_gradients()

    def abort(self) -> None:
        """Make the other processes' reductions fail, as this one's call failed."""
        if self._sum is not None:
            self._sum.abandon()

    def close_connections(self) -> None:
        """Close broken connections to other processes: the next call opens new ones."""
        if self._sum is not None:
            self._sum.disconnect_broken()

    def discard_gradients(self) -> None:
        """Discard the accumulated gradients, after an update or an error."""
        for accumulator in self._accumulators:
            accumulator.reset()
        for memory in self._memory.replicas:
            discard_averages(memory.parameters.values())
            for parameter in (*memory.parameters.values(), *memory.updated.values()):
                parameter.grad = None
        for name in self._memory.groups:
            self._memory.updated[name].grad = None

    def _accumulate_half(self, replica: int) -> None:
        """Add the half gradients of a replica's last micro-batch to the gradients of the float32 copies."""
        for parameter, updated in self._half[replica]:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                updated.grad = gradient.float() if updated.grad is None else updated.grad.add_(gradient)

    def _complete(self) -> List[float]:
        """Set the gradients of the only replica; return `_counts`."""
        counts = self._counts(0)
        for parameter, gradient, is_in_graph in zip(self._weights, self._gradients(0), self._is_in_graph.tolist()):
            parameter.grad = torch.zeros_like(parameter) if gradient is None and is_in_graph else gradient
        return counts

    def _counts(self, index: int) -> List[float]:
        """Return the counts of automatic loss scaling for the gradients of a replica; [] without it."""
        return [] if self._loss_scale is None else self._loss_scale.count(self._gradients(index))

    def _reduce(self, gradient_sum: GradientSum, is_last: bool) -> List[float]:
        """Set the sums as gradients of replica 0, whose parameters the optimizer updates; return `_counts` of all."""
        with torch.no_grad():
            with telemetry.span("sum the gradients", "reduction"):
                *sums, replicas, changed = gradient_sum(
                    [
                        [
                            *_with_flags(self._gradients(index), self._counts(index)),
                            self._buffers.changed(index, is_last),
                        ]
                        for index in range(len(self._trained))
                    ]
                )
            if is_last:
                self._buffers.exchange(changed.tolist(), gradient_sum.gather)
            if self._is_scaled:  # scaling works in place, and the sums may be in shared memory
                sums = [total.clone() for total in sums]
        for parameter, total, having in zip(self._weights, sums, (replicas + self._is_in_graph).tolist()):
            parameter.grad = total if having else None
        return replicas[len(self._weights) :].tolist()

    def _gradients(self, index: int) -> List[Optional[torch.Tensor]]:
        """Return the gradients of one local replica, with the shapes of `self._weights`."""
        gradients = [parameter.grad for parameter in self._trained[index]]
        if not self._memory.groups:
            return gradients
        groups, replica = self._memory.groups, self._first_replica + index
        return [
            stacked(gradient, groups[name], replica) if name in groups else gradient
            for name, gradient in zip(self._names, gradients)
        ]

    @property
    def _is_scaled(self) -> bool:
        values = self.optimizer.hyperparameters
        return self._gradient_terms * self.optimizer.loss_scaling != 1.0 or values.max_grad_norm != float("inf")

    def _scale(self, part: int) -> None:
        self.optimizer.scale(part, 1.0 / (self._gradient_terms * self.optimizer.loss_scaling))

    def _scale_and_step(self, part: int) -> None:
        self._scale(part)
        self.optimizer.step(part)


def _norm(gradients: List[Optional[torch.Tensor]]) -> float:
    """Return the norm of all gradients together; it does not depend on the number of threads, as torch's does."""
    flat = (each.detach().reshape(-1).double().numpy() for each in gradients if each is not None)
    try:
        return math.sqrt(math.fsum(float(np.add.reduce(np.square(values))) for values in flat))
    except (OverflowError, ValueError):
        return math.nan


def _with_flags(gradients: List[Optional[torch.Tensor]], counts: List[float]) -> List[Optional[torch.Tensor]]:
    """Return a replica's gradients, followed by a tensor: 1 for each gradient that exists, and `counts`."""
    return [*gradients, torch.tensor([*(float(gradient is not None) for gradient in gradients), *counts])]


def placement_of(options: Options) -> Placement:
    """Return the position of the local replicas among all replicas."""
    distributed = options.Distributed
    return Placement(options.replication_factor, distributed.processId, distributed.numProcesses)


def _half_accumulators(memory: DeviceMemory, values: Hyperparameters, options: Options) -> List[HalfAccumulator]:
    """Return one accumulator for each replica if gradients are accumulated in half, else none."""
    training: Any = options.Training
    if not values.accumulates_in_half or training.gradient_accumulation == 1:
        return []
    is_mean = training.accumulation_and_replication_reduction_type == ReductionType.Mean
    is_running = is_mean and training.meanAccumulationAndReplicationReductionStrategy == MeanReductionStrategy.Running
    return [HalfAccumulator(list(replica.updated.values()), is_running) for replica in memory.replicas]


def _terms(
    options: Options, placement: Placement, accumulators: List[HalfAccumulator], has_half: bool
) -> Tuple[int, int]:
    """Return the divisors of the loss and of the gradients for an update's mean; 1 and 1 for a sum."""
    training: Any = options.Training
    if training.accumulation_and_replication_reduction_type == ReductionType.Sum:
        return 1, 1
    if accumulators:
        # Values that are rounded to half must have the same magnitude as on the device.
        steps = 1 if accumulators[0].is_running else int(training.gradient_accumulation)
        return 1, steps * placement.total_replicas
    terms = int(training.gradient_accumulation) * placement.total_replicas
    # In float32 division by a power of two is exact anywhere, and dividing the loss saves a pass over the gradients.
    is_exact = terms & (terms - 1) == 0 and not has_half
    return (terms, 1) if is_exact else (1, terms)


def device_groups(
    optimizer: torch.optim.Optimizer, host: torch.nn.Module, memory: DeviceMemory
) -> List[Dict[str, torch.nn.Parameter]]:
    """Return the device's parameters by name for every parameter group of a host optimizer.

    Parameters of the optimizer that are not the model's are left out.
    """
    names = {id(parameter): name for name, parameter in host.named_parameters()}
    return [
        {names[id(p)]: memory.updated[names[id(p)]] for p in group["params"] if id(p) in names}
        for group in optimizer.param_groups
    ]
