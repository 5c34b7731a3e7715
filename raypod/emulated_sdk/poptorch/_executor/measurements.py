"""What an executor tells about its last call: cycles, times, latencies, anchored tensors (contract 2.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List

import torch

from poptorch._device.timeline import Latency
from poptorch._errors import Error
from poptorch.options import Options

if TYPE_CHECKING:
    from poptorch._device.program import Program


class Measurements:
    """The part of an executor that reports. Error for all of it unless compiled.

    Times are measured on the emulated device, so they are those of this CPU.
    """

    _options: Options
    _compilation_s: float

    def cycleCount(self) -> int:
        """Cycles of the last call: its seconds, measured here, by the clock of a Mk2 IPU.

        Error unless `options.logCycleCount(True)`, and before the first call.
        """
        if not self._options.log_cycle_count:
            raise Error("Cycle count logging is disabled. Please set option logCycleCount to True to enable.")
        if not self.isCompiled() or not self._compiled().timeline.micro_batches:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return self._compiled().timeline.cycles()

    def compilationTime(self) -> float:
        """How long compiling took, in seconds."""
        self._compiled()
        return self._compilation_s

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Times in seconds of the last call's events on replica 0; only differences of them mean something.

        Keys: "input", "input_complete" (one list per tensor of the arguments), "output" and "output_complete" (one per
        output tensor); in each list one time per micro-batch. Empty lists before the first call.
        """
        program = self._compiled()
        return program.timeline.counters(len(program.arguments.compiled.described), len(program.traced.dtypes))

    def getHostIpuLatency(self) -> Latency:
        """(min, max, average) seconds of bringing a micro-batch to the device in the last call."""
        return self._compiled().timeline.latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """(min, max, average) seconds between having a micro-batch's inputs and having its outputs."""
        return self._compiled().timeline.latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """(min, max, average) seconds of bringing a micro-batch's outputs to the host."""
        return self._compiled().timeline.latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """(min, max, average) seconds of the round trip of a micro-batch."""
        return self._compiled().timeline.latency("input", "output_complete")

    def getTensorNames(self) -> List[str]:
        """The names of all tensors that `options.anchorTensor` can ask for; see `poptorch._device.anchors`."""
        return list(self._compiled().traced.tensor_names)

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """An anchored tensor of the last call, by the output mode of its anchor.

        Error for a name that the options do not anchor, and before the first call.
        """
        program = self._compiled()
        if short_name not in self._options.anchored_tensors:
            known = ", ".join(sorted(self._options.anchored_tensors)) or "none"
            raise Error(f"No tensor is anchored as {short_name!r}; there are: {known}. See options.anchorTensor")
        if short_name not in program.anchored:
            raise Error(f"The anchored tensor {short_name!r} is there after a call, and there has been none yet")
        return program.anchored[short_name]

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        raise NotImplementedError

    def _compiled(self) -> Program:
        raise NotImplementedError
