"""What can be read of a compiled program: cycles, times, anchored tensors of its last call, and its replicas' state."""

from __future__ import annotations

import datetime
from typing import Any, Dict, List, Optional, Tuple

import torch

from poptorch.device.compile.arguments import CompiledInputs
from poptorch.device.compile.memory_estimate import IpuMemory, Stages, check_memory
from poptorch.device.execute.calls import check_usable
from poptorch.device.execute.program import MicroBatchTimes, Program, TrainingProgram
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.parallel.placement import Placement

# The clock of a Mk2 IPU. The emulated device measures seconds.
_CLOCK_HZ = 1.33e9

Latency = Tuple[float, float, float]


class Measurements:
    """Base class of `PoplarExecutor`: holds options and compiled program, reads the program's measurements and state.

    Times are those of the emulated device, so of this CPU.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._program: Optional[Program] = None
        self._compilation_s = 0.0
        self._loaded_replica_state: Optional[Dict[str, Any]] = None  # and not uploaded yet
        self._is_attached = False
        self._measures_gradients = False

    @property
    def options(self) -> Options:
        """The frozen options."""
        return self._options

    def isCompiled(self) -> bool:
        """Return whether the model is compiled."""
        return self._program is not None

    def _compiled(self) -> Program:
        if self._program is None:
            raise Error("Model has not been compiled or has been destroyed. Call it, or compile(), first")
        check_usable()
        return self._program

    def emulatedMemoryFormat(self) -> str:
        """Return the memory format of the convolutions, "contiguous" or "channels_last"; only the emulation has this.

        Raises Error unless the model is compiled.
        """
        return self._compiled().memory_format

    def cycleCount(self) -> int:
        """Return the duration of the last call in cycles of a Mk2 IPU's clock.

        Raises:
            Error: no call has run yet, or `options.logCycleCount(True)` is not set.
        """
        if not self._options._Popart.options["instrumentWithHardwareCycleCounter"]:
            raise Error("Cycle count logging is disabled. Please set option logCycleCount to True to enable.")
        if self._program is None or not self._program.call_s:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return round(self._program.call_s * _CLOCK_HZ)

    def compilationTime(self) -> datetime.timedelta:
        """Return the duration of the compilation.

        Raises:
            Error: the model is not compiled, or `options.showCompilationProgressBar(False)` is set.
        """
        if self._program is None:
            raise Error("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar option to obtain compilation time.")
        return datetime.timedelta(seconds=self._compilation_s)

    @property
    def _executable(self) -> Optional[Program]:
        # Published programs test whether it is None, to find out whether the model is compiled.
        return self._program

    @property
    def _executable_inputs(self) -> Optional[CompiledInputs]:
        # Published programs read the batch size from it that the model is compiled for.
        return None if self._program is None else self._program.arguments.compiled_inputs()

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return the times in seconds of the last call's events on replica 0; only their differences are meaningful.

        The keys are "input" and "input_complete", with one list per tensor of the arguments, and "output" and
        "output_complete", with one list per output tensor. Each list has one time per micro-batch; the tensors of a
        micro-batch are transferred together. The lists are empty before the first call and with synthetic data; before
        the compilation there is one per key.
        """
        program = self._program
        if program is None:
            return {event: [[]] for event in MicroBatchTimes._fields}
        inputs, outputs = len(program.arguments.spec.tensors), len(program.traced.dtypes)
        tensors = {"input": inputs, "input_complete": inputs, "output": outputs, "output_complete": outputs}
        return {
            event: [[getattr(times, event) for times in program.micro_batch_times] for _ in range(number)]
            for event, number in tensors.items()
        }

    def getHostIpuLatency(self) -> Latency:
        """Return (min, max, average) seconds of the transfer of a micro-batch's inputs in the last call."""
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return (min, max, average) seconds between a micro-batch's inputs and its outputs on the device."""
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return (min, max, average) seconds of the transfer of a micro-batch's outputs."""
        return self._latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """Return (min, max, average) seconds of the round trip of a micro-batch."""
        return self._latency("input", "output_complete")

    def _latency(self, start: str, end: str) -> Latency:
        measured = self._program.micro_batch_times if self._program is not None else []
        spans = [getattr(times, end) - getattr(times, start) for times in measured]
        return (min(spans), max(spans), sum(spans) / len(spans)) if spans else (0.0, 0.0, 0.0)

    def getTensorNames(self) -> List[str]:
        """Return the names of all tensors that `options.anchorTensor` accepts; see `poptorch.device.compile.arguments`.

        Raises AssertionError before the compilation.
        """
        assert self._program is not None, "Model must be compiled before calling getTensorNames"
        return list(self._program.tensor_names)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """Return an anchored tensor of the last call, by the output mode of its anchor.

        Raises:
            AssertionError: the options do not anchor this name, or no call has run yet.
        """
        known = ", ".join(sorted(self._options.anchored_tensors)) or "none"
        anchored = {} if self._program is None else self._program.anchored
        assert short_name in anchored, (
            f"No tensor with name {short_name!r} found: tensors are available after a call, and anchored are {known}. "
            "See options.anchorTensor"
        )
        return anchored[short_name]

    def emulatedPlacement(self) -> Placement:
        """Return the stages and tensors on each IPU. Only the emulation has this method."""
        return self._compiled().traced.placement

    def emulatedMemory(
        self,
        micro_batch_factor: float = 1.0,
        replicas: Optional[int] = None,
        stages: Optional[Stages] = None,
        is_pipelined: bool = True,
        is_checked: bool = False,
    ) -> Tuple[IpuMemory, ...]:
        """Return an estimate of the memory of each IPU of a replica. Only the emulation has this method.

        Args:
            micro_batch_factor: the micro-batch is this factor times the compiled one.
            replicas: the replicas of this process, which share sharded tensors; default: those of the options.
            stages: the IPU of each stage, and the compiled stages that it consists of; default: the compiled ones.
            is_pipelined: whether such `stages` are a pipeline, else they are sharded.
            is_checked: warn of an IPU whose memory does not suffice; in strict mode raise Error.
        """
        memory = self._compiled().estimated_memory(micro_batch_factor, replicas, stages, is_pipelined)
        if is_checked:
            check_memory(memory)
        return memory

    def emulatedReplicaState(self) -> Dict[str, Any]:
        """Return the state of each replica of ALL processes after the last complete call; only the emulation has this.

        With weights and optimizer state, which are the same in all processes, any process can continue the training.

        Returns:
            A copy: `buffers` has each floating point buffer of the module, of shape [total replicas, *shape], and
            `rng_state` the state of the random numbers.

        Raises Error unless the model is a compiled training model.
        """
        if self._loaded_replica_state is not None:
            return self._loaded_replica_state
        return self._training_program().replica_state()

    def loadEmulatedReplicaState(self, state: Dict[str, Any]) -> None:
        """Load a state of `emulatedReplicaState`: at once if attached, else with the next upload of the weights.

        Raises Error at that time if its buffers or its number of replicas differ.
        """
        self._loaded_replica_state = state
        if self._is_attached:
            self._upload_replica_state()

    def emulatedMeasureGradients(self) -> None:
        """Measure the norm of the gradients in every update; call it before the first call.

        Only the emulation has this.
        """
        self._measures_gradients = True

    def emulatedGradientNorms(self) -> List[float]:
        """Return the norm of all gradients together of each update of the last call; only the emulation has this.

        The gradients are those of all replicas, scaled as the optimizer gets them, before `max_grad_norm` clips them.

        Raises Error unless the model is a compiled training model.
        """
        return self._training_program().gradient_norms()

    def _training_program(self) -> TrainingProgram:
        program = self._compiled()
        if not isinstance(program, TrainingProgram):
            raise Error("Only a training model with an optimizer has a state of its replicas")
        return program

    def _upload_replica_state(self) -> None:
        state, self._loaded_replica_state = self._loaded_replica_state, None
        if state is not None:
            self._training_program().load_replica_state(state)
