"""The compiled program: what one call runs on the device (contract 2.2, 2.5)."""

from __future__ import annotations

import functools
import time
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence

import torch

from poptorch._device.anchors import AnchorOutputs, anchors_of
from poptorch._device.compilation import Checks, Trace, trace
from poptorch._device.memory import DeviceMemory
from poptorch._device.replica import Forward, Replica
from poptorch._device.replica_threads import ReplicaThreads
from poptorch._device.synthetic import synthetic_block
from poptorch._device.timeline import MicroBatch, Timeline
from poptorch._device.transaction import CallTransaction, NoTransaction, ReplicaBuffers
from poptorch._device.weight_update import NoUpdate, WeightUpdate, device_groups, placement_of, reduction_strategy
from poptorch._errors import Error
from poptorch._executor.arguments import Arguments
from poptorch._executor.layout import BatchLayout
from poptorch._executor.outputs import OutputCollector, check_output_mode
from poptorch._optimizers.device_optimizer import DeviceOptimizer
from poptorch._optimizers.hyperparameters import Hyperparameters, extract
from poptorch._parallel.limits import check_number, check_overlap, check_placement
from poptorch._parallel.placement import Placement
from poptorch.options import Options


class _Call(NamedTuple):
    """What one call brings and takes away."""

    inputs: Sequence[torch.Tensor]
    outputs: OutputCollector
    anchors: AnchorOutputs


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
        self._transaction = NoTransaction()
        self._checks_numbers = options.Precision.enable_fp_exceptions
        self._threads = ReplicaThreads(self.layout.replicas)
        self._synthetic = synthetic_block(arguments, self.layout) if options.enable_synthetic_data else None
        self.traced = self._trace() if traced is None else traced
        check_placement(self.placement, options, self.is_training)
        check_overlap(options, self.traced.overlapped)
        first = placement_of(options).first_replica
        memories = enumerate(self.memory.replicas)
        self._anchors = anchors_of(options, self.traced.tensor_names)
        anchored = [anchor.name for anchor in self._anchors]
        self._replicas = [
            Replica(memory, arguments, self.traced, first + index, anchored) for index, memory in memories
        ]
        self.anchored: Dict[str, torch.Tensor] = {}
        self.timeline = Timeline()
        self.rng_state = [options.random_seed if options.exists("random_seed") else torch.initial_seed(), 0]

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run one call on the tensors of the arguments; returns what `forward` returns, by the output mode.

        A call of training that fails leaves weights, optimizer state, buffers and counters as it found them.
        """
        options = self._options
        mode, period = options.output_mode, options.output_return_period
        call = _Call(
            inputs,
            OutputCollector(mode, period, self.layout, self.traced.dtypes),
            AnchorOutputs(self._anchors, self.layout),
        )
        began = time.perf_counter()
        self.timeline.micro_batches = []
        last = self.layout.device_iterations - 1
        self._transaction.begin()
        try:
            for iteration in range(self.layout.device_iterations):
                self._threads.each(functools.partial(self._run_steps, iteration, call))
                self._update.apply(self._threads, iteration == last)
                call.anchors.add_updated(iteration, self.memory.parameters)
                if self._checks_numbers and self.is_training:
                    self._check_weights()
        except BaseException:
            self._update.abandon()
            self._transaction.roll_back()
            raise
        finally:
            self._update.discard_gradients()
        self._transaction.commit()
        results = call.outputs.assemble()
        self.anchored = call.anchors.assemble()
        self.timeline.seconds = time.perf_counter() - began
        if self._synthetic is not None:
            results = [result.zero_() for result in results]
        return self.traced.structure.rebuild(results)

    @property
    def rng_state(self) -> List[int]:
        """Seed, and micro-batches run by each replica: together they decide the device's random numbers."""
        return [self._replicas[0].seed, self._replicas[0].micro_batches]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        for replica in self._replicas:
            replica.seed, replica.micro_batches = state

    def upload(self) -> None:
        """Bring the host's weights and buffers to the device."""
        self.memory.upload()
        self._transaction.note_upload()

    def let_go(self) -> None:
        """Forget wires to other processes that are broken."""
        self._update.let_go()

    def upload_buffers(self, names: Sequence[str]) -> None:
        """Bring these buffers of the host to the device. Error for names of no buffer."""
        self.memory.upload_buffers(names)
        self._transaction.note_upload()
        for replica in self._replicas:
            replica.take_constants()

    @property
    def placement(self) -> Placement:
        """What lies on which IPU."""
        return self.traced.placement

    def close(self) -> None:
        """End the replicas' threads."""
        self._threads.close()

    def _run_steps(self, iteration: int, call: _Call, index: int) -> None:
        """One replica's micro-batches of one device iteration."""
        replica = self._replicas[index]
        with torch.set_grad_enabled(self.is_training):
            for step in range(self.layout.accumulation_steps):
                started = time.perf_counter()
                forward = replica.forward(self._block(call.inputs, iteration, step, index))
                if self._checks_numbers:
                    _check_numbers(forward)
                with replica.backward_random():
                    self._update.backward(index, forward.loss)
                computed = time.perf_counter()
                call.outputs.add(iteration, step, index, forward.outputs)
                if replica.watch is not None:
                    call.anchors.add(iteration, step, index, replica.watch, self._update.loss_terms)
                if index == 0:
                    times = MicroBatch(started, replica.inputs_complete_s, computed, time.perf_counter())
                    self.timeline.micro_batches.append(times)

    def _block(self, inputs: Sequence[torch.Tensor], iteration: int, step: int, index: int) -> List[torch.Tensor]:
        if self._synthetic is not None:
            return self._synthetic
        return self.layout.cut(inputs, self.layout.block(iteration, step, index))

    def _check_weights(self) -> None:
        for name, parameter in self.memory.parameters.items():
            if not torch.isfinite(parameter).all():
                raise Error(f"Floating point exception: the update left NaN or infinity in the parameter {name!r}")

    def _trace(self) -> Trace:
        first_tensors = self.arguments.take_first_tensors()
        self.layout.check(first_tensors)
        first_block = self._synthetic or self.layout.cut(first_tensors, 0)
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
        buffers = self._buffers = ReplicaBuffers(self.memory, placement_of(options))
        self._update = WeightUpdate(
            self.memory, self.optimizer, options, self.traced.trained, self._count_micro_batches, buffers
        )
        has_several_updates = self.layout.device_iterations > 1
        self._transaction = CallTransaction(self.memory, self.optimizer, self._replicas, buffers, has_several_updates)

    def replica_state(self) -> Dict[str, Any]:
        """What each replica of all processes has of its own after the last complete call; the state is a copy."""
        return {"buffers": self._buffers.state(), "rng_state": self.rng_state}

    def load_replica_state(self, state: Dict[str, Any]) -> None:
        """Take over a `replica_state()`. Error if it is of other buffers or of another number of replicas."""
        self._buffers.load(state["buffers"])
        self.rng_state = state["rng_state"]

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
