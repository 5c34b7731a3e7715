"""When the parts of a call took place, on replica 0: the performance counters of an executor (contract 2.6)."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

Latency = Tuple[float, float, float]

# Cycles are those of a Mk2 IPU. The emulated device counts seconds and has none of its own.
_CLOCK_HZ = 1.33e9


class MicroBatch(NamedTuple):
    """The times of one micro-batch in seconds, as `time.perf_counter` counts them.

    Attributes:
        input: the device asks for its inputs.
        input_complete: they are there.
        output: the outputs are computed, and in training the gradients accumulated.
        output_complete: the host has them.
    """

    input: float
    input_complete: float
    output: float
    output_complete: float


class Timeline:
    """The micro-batches of the last call, in order, and how long that was."""

    def __init__(self) -> None:
        self.micro_batches: List[MicroBatch] = []
        self.seconds = 0.0

    def counters(self, inputs: int, outputs: int) -> Dict[str, List[List[float]]]:
        """For every event its times: one list per tensor of the arguments or outputs, one time per micro-batch.

        The tensors of a micro-batch travel together here.
        """
        number = {"input": inputs, "input_complete": inputs, "output": outputs, "output_complete": outputs}
        return {
            event: [[getattr(micro_batch, event) for micro_batch in self.micro_batches] for _ in range(tensors)]
            for event, tensors in number.items()
        }

    def latency(self, start: str, end: str) -> Latency:
        """(min, max, average) in seconds of the time between two events; zeros before the first call."""
        spans = [getattr(micro_batch, end) - getattr(micro_batch, start) for micro_batch in self.micro_batches]
        return (min(spans), max(spans), sum(spans) / len(spans)) if spans else (0.0, 0.0, 0.0)

    def cycles(self) -> int:
        """The length of the last call in cycles of a Mk2 IPU's clock."""
        return round(self.seconds * _CLOCK_HZ)
