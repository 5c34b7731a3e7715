"""The compiled program runs the micro-batches and weight updates of a call."""

from __future__ import annotations

import functools
import time
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from _pod.telemetry import is_inspection

from poptorch.custom_operators.collectives import ReplicaExchange
from poptorch.device.compile.arguments import (
    FINAL_LOSS_SCALE,
    Arguments,
    BatchLayout,
    anchors_of,
    check_output_period,
    synthetic_inputs,
)
from poptorch.device.compile.compilation import (
    CHANNELS_LAST,
    CONTIGUOUS,
    CompiledForward,
    Trace,
    TraceSettings,
    checked_loss_output,
    choose_memory_format,
    convolution_weights,
    is_torch_compile_requested,
    trace,
)
from poptorch.device.compile.memory import DeviceMemory, Groupings, ReplicaGroups, groups_of
from poptorch.device.compile.memory_estimate import IpuMemory, Stages, Usage, check_memory, estimate_memory, merged
from poptorch.device.compile.operator_check import NeedsGradients
from poptorch.device.execute.calls import (
    AnchorOutputs,
    CallTransaction,
    OutputCollector,
    ReplicaBuffers,
    TrainingTransaction,
)
from poptorch.device.execute.replica import Forward, Replica, ReplicaThreads
from poptorch.device.execute.weight_update import NoUpdate, WeightUpdate, device_groups, placement_of
from poptorch.device.kernels import convolution
from poptorch.device.kernels.numerics import rounds_stochastically
from poptorch.enums import MeanReductionStrategy
from poptorch.errors import Error
from poptorch.optimizers.device_optimizer import DeviceOptimizer
from poptorch.optimizers.hyperparameters import Hyperparameters, extract
from poptorch.options import Options
from poptorch.parallel.placement import check_number, check_overlap, check_placement

_AUTO_LOSS_SCALING = "automaticLossScalingSettings.enabled"


class MicroBatchTimes(NamedTuple):
    """The times of one micro-batch on replica 0, in seconds of `time.perf_counter`.

    Attributes:
        input: the device requests the inputs.
        input_complete: the inputs are on the device.
        output: the outputs are computed, and in training the gradients accumulated.
        output_complete: the outputs are on the host.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


class _Call(NamedTuple):
    """The inputs of one call, the collectors of its outputs, and the times of its micro-batches."""

    inputs: Sequence[torch.Tensor]
    outputs: OutputCollector
    anchors: AnchorOutputs
    times: List[MicroBatchTimes]


class Program:
    """Runs the device iterations of a call on all local replicas. This class runs inference: forwards only.

    Attributes:
        anchored: the anchored tensors of the last complete call, by short name.
        micro_batch_times: the times of that call's micro-batches, in order.
        call_s: the duration of that call, in seconds.
    """

    is_training = False
    optimizer: Optional[DeviceOptimizer] = None

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        arguments: Arguments,
        user_model: torch.nn.Module,
        groupings: Groupings,
    ) -> None:
        check_output_period(options.output_mode, options.output_return_period, options.device_iterations)
        self.arguments = arguments
        self.layout = BatchLayout.of(options)
        check_number(self.layout.replicas)  # before the replicas are created
        placement = placement_of(options)
        groups = groups_of(groupings, dict(model.named_parameters()), placement.total_replicas)
        self._options = options
        self._update = NoUpdate()
        compiler = options._Popart.options
        self._checks_numbers = compiler.get("enableFloatingPointChecks")
        self._exchange = ReplicaExchange(placement)
        self._synthetic = synthetic_inputs(arguments.spec, self.layout) if compiler.get("syntheticDataMode") else None
        with self._exchange.compiling():
            self.memory, self.traced = self._compiled(model, user_model, groups)
        self.traced.changes.show()
        self._threads = ReplicaThreads(self.layout.replicas, at_once=self._exchange.is_used)
        check_placement(self.traced.placement, options, self.is_training)
        check_overlap(options, self.traced.overlapped)
        adapts_loss_scaling = self.is_training and compiler.get(_AUTO_LOSS_SCALING)
        self.tensor_names = (*self.traced.tensor_names, *([FINAL_LOSS_SCALE] if adapts_loss_scaling else []))
        self._anchors = anchors_of(options, self.tensor_names)
        anchored = [anchor.name for anchor in self._anchors]
        compiled = None
        if self.is_training and is_torch_compile_requested() and not is_inspection():
            loss_output = checked_loss_output(self.traced, anchored)
            example_inputs = self._synthetic or arguments.example_inputs
            compiled = CompiledForward(self.memory.scratch(), arguments, example_inputs, loss_output)
        elif self.memory.channels_last and self.traced.is_plain:
            for memory in self.memory.replicas:
                convolution.specialize(memory.module)
        self._replicas = [
            Replica(
                memory,
                arguments,
                self.traced,
                placement.first_replica + index,
                anchored,
                rounds_stochastically(options),
                compiled,
            )
            for index, memory in enumerate(self.memory.replicas)
        ]
        self._transaction = CallTransaction(self._replicas)
        self.anchored: Dict[str, torch.Tensor] = {}
        self.micro_batch_times: List[MicroBatchTimes] = []
        self.call_s = 0.0
        self.rng_state = [options.random_seed if options.exists("random_seed") else torch.initial_seed(), 0]
        if not self.is_training:
            self._check_memory()

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Run one call on the tensors of the arguments and return what `forward` returns, by the output mode.

        A call that fails leaves weights, optimizer state, buffers and counters as they were.
        """
        options = self._options
        mode, period = options.output_mode, options.output_return_period
        call = _Call(
            inputs,
            OutputCollector(mode, period, self.layout, self.traced.dtypes),
            AnchorOutputs(self._anchors, self.layout),
            [],
        )
        began = time.perf_counter()
        last = self.layout.device_iterations - 1
        self._transaction.begin()
        try:
            for iteration in range(self.layout.device_iterations):
                run = functools.partial(self._run_micro_batches, iteration, call)
                self._threads.each("micro-batches", self._exchange.around(run))
                if iteration == last:  # before the weights change: it fails if the shapes differ
                    results, anchored = call.outputs.assemble(), call.anchors.assemble(updated=False)
                self._update.apply(self._threads, iteration == last)
                call.anchors.add_updated(iteration, self.memory.parameters)
                if self._checks_numbers and self.is_training:
                    self._check_weights()
        except BaseException:
            self._update.abort()
            self._transaction.roll_back()
            self._update.discard_gradients()
            raise
        self._transaction.commit()
        self.anchored = {**anchored, **call.anchors.assemble(updated=True)}
        self.micro_batch_times, self.call_s = call.times, time.perf_counter() - began
        if self._synthetic is not None:
            results = [result.zero_() for result in results]
        return self.traced.structure.unflatten(results)

    @property
    def memory_format(self) -> str:
        """The memory format of the convolutions: "contiguous" or "channels_last"."""
        return CHANNELS_LAST if self.memory.channels_last else CONTIGUOUS

    @property
    def rng_state(self) -> List[int]:
        """The seed, and the micro-batches run by each replica, which determine the device's random numbers."""
        return [self._replicas[0].seed, self._replicas[0].micro_batches]

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        for replica in self._replicas:
            replica.seed, replica.micro_batches = state

    def _check_memory(self) -> None:
        if not is_inspection():
            check_memory(self.estimated_memory())

    def estimated_memory(
        self,
        micro_batch_factor: float = 1.0,
        replicas: Optional[int] = None,
        stages: Optional[Stages] = None,
        is_pipelined: bool = True,
    ) -> Tuple[IpuMemory, ...]:
        """Return the estimated memory of each IPU; see `PoplarExecutor.emulatedMemory`."""
        values = None if self.optimizer is None else self.optimizer.hyperparameters
        usage = Usage(self.memory.parameters, self.traced.trained, values, replicas or self.layout.replicas)
        placement, activations, is_pipeline = self.traced.placement, self.traced.activations, None
        if stages is not None:
            placement, activations, is_pipeline = *merged(placement, activations, stages), is_pipelined
        return estimate_memory(placement, activations, self._options, usage, micro_batch_factor, is_pipeline)

    def upload(self) -> None:
        """Copy the host's weights and buffers to the device."""
        self.memory.upload()
        self._transaction.buffers_uploaded()

    def upload_buffers(self, names: Sequence[str]) -> None:
        """Copy these buffers of the host to the device. Raises Error for an unknown name."""
        self.memory.upload_buffers(names)
        self._transaction.buffers_uploaded()
        for replica in self._replicas:
            replica.save_constants()

    def close_connections(self) -> None:
        """Close broken connections to other processes: the next call opens new ones."""
        self._update.close_connections()
        self._exchange.close_connections()

    def close(self) -> None:
        """Stop the replicas' threads."""
        self._threads.close()

    def _compiled(
        self, model: torch.nn.Module, user_model: torch.nn.Module, groups: Mapping[str, ReplicaGroups]
    ) -> Tuple[DeviceMemory, Trace]:
        """Return the memory and the trace of a model, in the memory format of `memory_format`."""
        options, first = self._options, placement_of(self._options).first_replica
        reject_changed_buffers = self.layout.input_groups > 1 and options.broadcast_buffers
        settings = TraceSettings(
            self.is_training, self.is_training, reject_changed_buffers, options._execution_strategy
        )
        example_inputs = self._synthetic or self.arguments.example_inputs

        def compiled(channels_last: FrozenSet[str]) -> Tuple[DeviceMemory, Trace]:
            memory = DeviceMemory(model, self.layout.replicas, user_model, groups, first, channels_last)
            memory.check_buffers(options._Popart.options.get("updatableNamedBuffers") or ())
            try:
                return memory, trace(memory.scratch(), self.arguments, example_inputs, settings)
            except NeedsGradients:
                with_gradients = settings._replace(gradients=True)
                return memory, trace(memory.scratch(), self.arguments, example_inputs, with_gradients)

        return choose_memory_format(convolution_weights(model, groups), compiled)

    def _run_micro_batches(self, iteration: int, call: _Call, index: int) -> None:
        """Run one replica's micro-batches of one device iteration."""
        replica = self._replicas[index]
        for step in range(self.layout.accumulation_steps):
            with torch.set_grad_enabled(self.traced.gradients), replica.arithmetic():
                started = time.perf_counter()
                try:
                    forward = replica.forward(self._inputs(call.inputs, iteration, step, index))
                    if self._checks_numbers:
                        _check_numbers(forward)
                    with replica.backward_random():
                        self._update.backward(index, forward.loss)
                finally:
                    replica.end_micro_batch()
                computed = time.perf_counter()
                call.outputs.add(iteration, step, index, forward.outputs)
                if replica.anchor_recorder is not None:
                    call.anchors.add(iteration, step, index, replica.anchor_recorder, self._update.scales)
                if index == 0 and self._synthetic is None:  # synthetic data is not transferred
                    times = MicroBatchTimes(started, replica.inputs_complete_s, computed, time.perf_counter())
                    call.times.append(times)

    def _inputs(self, inputs: Sequence[torch.Tensor], iteration: int, step: int, index: int) -> List[torch.Tensor]:
        if self._synthetic is not None:
            return self._synthetic
        return self.layout.select(inputs, self.layout.index(iteration, step, index))

    def _check_weights(self) -> None:
        for name, parameter in self.memory.parameters.items():
            if not torch.isfinite(parameter).all():
                raise Error(f"Floating point exception: the parameter {name!r} has NaN or infinity after the update")


class TrainingProgram(Program):
    """Runs a weight update in every device iteration."""

    is_training = True
    optimizer: DeviceOptimizer

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        arguments: Arguments,
        optimizer: torch.optim.Optimizer,
        user_model: torch.nn.Module,
        groupings: Groupings,
    ) -> None:
        super().__init__(model, options, arguments, user_model, groupings)
        self._host = model
        groups = device_groups(optimizer, model, self.memory)
        _check_own(optimizer, groups, any(each.requires_grad for each in self.memory.parameters.values()))
        values = extract(optimizer)
        adapts_loss_scaling = options._Popart.options.get(_AUTO_LOSS_SCALING)
        if adapts_loss_scaling:
            values = values._replace(variable=values.variable | {"loss_scaling"})
        replica_groups = {name: found.number for name, found in self.memory.groups.items()}
        self.optimizer = DeviceOptimizer(values, groups, self.layout.replicas, replica_groups)
        if adapts_loss_scaling:
            self.optimizer.loss_scale_update_factor = 1.0
        buffers = self._buffers = ReplicaBuffers(self.memory, placement_of(options))
        self._update = self._weight_update = WeightUpdate(
            self.memory,
            self.optimizer,
            options,
            self.traced.trained,
            self._count_micro_batches,
            buffers,
            self.traced.has_half,
        )
        self._check_memory()
        can_fail_later = self.layout.device_iterations > 1 or bool(self._checks_numbers)
        self._transaction = TrainingTransaction(self.memory, self.optimizer, self._replicas, buffers, can_fail_later)

    def replica_state(self) -> Dict[str, Any]:
        """Return a copy of the state of each replica of all processes after the last complete call."""
        return {"buffers": self._buffers.state(), "rng_state": self.rng_state}

    def measure_gradients(self, is_on: bool) -> None:
        """Measure the norm of the gradients in every update from now on, or in none."""
        self._weight_update.measures_gradients = is_on

    def gradient_norms(self) -> List[float]:
        """Return the norm of the gradients of each update of the last call, before they are clipped."""
        return list(self._weight_update.gradient_norms)

    def load_replica_state(self, state: Dict[str, Any]) -> None:
        """Load a `replica_state()`. Raises Error if its buffers or its number of replicas differ."""
        self._buffers.load(state["buffers"])
        self.rng_state = state["rng_state"]

    def check_optimizer(self, values: Hyperparameters) -> None:
        """Check that these values can replace the compiled ones.

        Raises:
            ValueError: they accumulate in half, and the options have another `MeanReductionStrategy` than Running.
            Error: a compile-time constant differs.
        """
        compiled = MeanReductionStrategy(self._options.Training.meanAccumulationAndReplicationReductionStrategy)
        if values.needs_running_mean and compiled != MeanReductionStrategy.Running:
            raise ValueError(
                "Invalid optimizer: the new optimizer would require changing options.Training."
                "meanAccumulationAndReplicationReductionStrategy to poptorch.MeanReductionStrategy.Running, as it "
                f"accumulates in half, but the executable is already compiled, with {compiled.name}. Set the strategy "
                "before, or wrap the model again"
            )
        self.optimizer.hyperparameters.check_change(values)

    def group_names(self, optimizer: torch.optim.Optimizer) -> List[FrozenSet[str]]:
        """Return for every parameter group of a host optimizer the names of the parameters that are the model's."""
        return [frozenset(group) for group in device_groups(optimizer, self._host, self.memory)]

    def _count_micro_batches(self) -> int:
        return self._replicas[0].micro_batches


def _check_own(optimizer: torch.optim.Optimizer, groups: Sequence[Dict[str, Any]], is_trainable: bool) -> None:
    """Raise Error if the optimizer has parameters that are not the model's, which no program would update."""
    foreign = sum(len(group["params"]) for group in optimizer.param_groups) - sum(map(len, groups))
    if foreign and is_trainable:  # the default optimizer of a model without parameters has one of its own
        raise Error(f"{foreign} parameters of the optimizer are not parameters of the model: pass those of the model")


def _check_numbers(forward: Forward) -> None:
    for tensor in (*forward.outputs, forward.loss):
        if tensor is not None and tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise Error("Floating point exception: an output or the loss has NaN or infinity")
