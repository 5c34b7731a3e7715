"""The compiled program: what one call runs on the device (contract 2.2, 2.5)."""

from __future__ import annotations

import functools
from typing import Any, FrozenSet, List, Optional, Sequence

import torch

from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.layout import BatchLayout
from poptorch._executor.outputs import OutputCollector, check_output_mode
from poptorch._optimizers.device_optimizer import DeviceOptimizer
from poptorch._optimizers.hyperparameters import Hyperparameters, extract
from poptorch._parallel.limits import check_number, check_overlap, check_placement
from poptorch._parallel.placement import Placement
from poptorch.options import Options

from .compilation import Checks, Trace, trace
from .memory import DeviceMemory
from .replica import Forward, Replica
from .replica_threads import ReplicaThreads
from .weight_update import NoUpdate, WeightUpdate, device_groups, placement_of, reduction_strategy


class Program:
    """Runs the device iterations of a call on all local replicas.

    As it stands it is an inference program: forwards only.
    """

    is_training = False

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        arguments: Arguments,
        user_model: Optional[torch.nn.Module] = None,
        traced: Optional[Trace] = None,
    ) -> None:
        check_output_mode(options)
        self.arguments = arguments
        self.layout = BatchLayout.of(options)
        check_number(self.layout.replicas)  # before so many are made
        self.memory = DeviceMemory(model, self.layout.replicas, user_model)
        self._options = options
        self._update = NoUpdate()
        self._checks_numbers = options.Precision.enable_fp_exceptions
        self._threads = ReplicaThreads(self.layout.replicas)
        self.traced = self._trace() if traced is None else traced
        check_placement(self.placement, options, self.is_training)
        check_overlap(options, self.traced.overlapped)
        first = placement_of(options).first_replica
        memories = enumerate(self.memory.replicas)
        self._replicas = [Replica(memory, arguments, self.traced, first + index) for index, memory in memories]
        self.rng_state = [options.random_seed if options.exists("random_seed") else torch.initial_seed(), 0]

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run one call on the tensors of the arguments; returns what `forward` returns, by the output mode."""
        outputs = OutputCollector(self._options, self.layout, self.traced.dtypes)
        try:
            for iteration in range(self.layout.device_iterations):
                self._threads.each(functools.partial(self._run_steps, iteration, inputs, outputs))
                self._update.apply(self._threads)
        except BaseException:
            self._update.abandon()
            raise
        finally:
            self._update.discard_gradients()
        return self.traced.structure.rebuild(outputs.assemble())

    @property
    def rng_state(self) -> List[int]:
        """Seed, and micro-batches run by each replica: together they decide the device's random numbers."""
        return [self._replicas[0].seed, self._replicas[0].micro_batches]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        for replica in self._replicas:
            replica.seed, replica.micro_batches = state

    @property
    def placement(self) -> Placement:
        """What lies on which IPU."""
        return self.traced.placement

    def close(self) -> None:
        """End the replicas' threads."""
        self._threads.close()

    def _run_steps(
        self, iteration: int, inputs: Sequence[torch.Tensor], outputs: OutputCollector, replica: int
    ) -> None:
        """One replica's micro-batches of one device iteration."""
        with torch.set_grad_enabled(self.is_training):
            for step in range(self.layout.accumulation_steps):
                block = self.layout.block(iteration, step, replica)
                forward = self._replicas[replica].forward(self.layout.cut(inputs, block))
                if self._checks_numbers:
                    _check_numbers(forward)
                with self._replicas[replica].backward_random():
                    self._update.backward(replica, forward.loss)
                outputs.add(iteration, step, replica, forward.outputs)

    def _trace(self) -> Trace:
        first_tensors = self.arguments.take_first_tensors()
        self.layout.check(first_tensors)
        first_block = self.layout.cut(first_tensors, 0)
        refuse_changed_buffers = self.layout.input_groups > 1 and self._options.broadcast_buffers
        checks = Checks(self.is_training, refuse_changed_buffers, self._options._execution_strategy)
        return trace(self.memory.scratch(), self.arguments, first_block, checks)


class TrainingProgram(Program):
    """Runs a weight update in every device iteration."""

    is_training = True

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        arguments: Arguments,
        optimizer: torch.optim.Optimizer,
        user_model: Optional[torch.nn.Module] = None,
        traced: Optional[Trace] = None,
    ) -> None:
        super().__init__(model, options, arguments, user_model, traced)
        self._host = model
        groups = device_groups(optimizer, model, self.memory)
        values = extract(optimizer)
        if options.Training.auto_loss_scaling:
            values = values._replace(variable=values.variable | {"loss_scaling"})
        self.optimizer = DeviceOptimizer(values, groups, parts=self.layout.replicas)
        self._update = WeightUpdate(
            self.memory, self.optimizer, options, self.traced.trained, self._count_micro_batches
        )

    def check_optimizer(self, values: Hyperparameters) -> None:
        """Error when these values need another compilation; ValueError when it is for how they take a mean."""
        compiled, needed = (reduction_strategy(self._options, of) for of in (self.optimizer.hyperparameters, values))
        if compiled != needed:
            raise ValueError(
                f"The model was compiled with MeanReductionStrategy.{compiled.name}, but the types of this optimizer's "
                f"accumulators need {needed.name}: set the strategy by options.Training, or wrap the model again"
            )
        self.optimizer.hyperparameters.check_change(values)

    def group_names(self, optimizer: torch.optim.Optimizer) -> List[FrozenSet[str]]:
        """For every parameter group of a host optimizer, the names of those that are the model's."""
        return [frozenset(group) for group in device_groups(optimizer, self._host, self.memory)]

    def _count_micro_batches(self) -> int:
        return self._replicas[0].micro_batches


def _check_numbers(forward: Forward) -> None:
    for tensor in (*forward.outputs, forward.loss):
        if tensor is not None and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise Error("Floating point exception: an output or the loss holds NaN or infinity")
