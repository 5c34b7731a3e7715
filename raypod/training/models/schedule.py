"""Which pipeline stage works when: one weight update, or one call of inference, as a table of cycles and stages.

Pure functions of the stages' costs, in any unit of time, and of the number of micro-batches.

A pipeline of F forward stages has 2F-1 stages in training: the backward of stage s is stage 2F-2-s, and the last stage
runs forward and backward in one cycle. In every cycle each stage runs the forward of at most one micro-batch and the
backward of at most one other; the slowest IPU determines the length of the cycle. m micro-batches therefore take
m + 2F - 2 cycles, of which 2F-2 fill the pipeline and 2F-2 drain it, so gradient accumulation must be at least 2F-1.
Inference takes m + F - 1 cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

RAMP_UP, MAIN, RAMP_DOWN, UPDATE = "ramp-up", "main", "ramp-down", "update"


@dataclass(frozen=True)
class StageCost:
    """Time of one forward stage: forward and backward of a micro-batch, and the weight update.

    Attributes:
        ipu: IPU of the stage; None for an IPU that no other stage uses.
        phase: only used by phased execution.
    """

    forward: float
    backward: float = 0.0
    update: float = 0.0
    ipu: Optional[int] = None
    phase: int = 0

    @classmethod
    def estimate(cls, forward_operations: int, parameter_elements: int, ipu: int, phase: int) -> StageCost:
        """Return a cost in operations: the backward is twice the forward, the update one per parameter element."""
        forward = float(max(forward_operations, 1))
        return cls(forward, 2 * forward, float(parameter_elements), ipu, phase)


class Cell(NamedTuple):
    """What one stage does in one cycle. A stage that runs forward and backward in one cycle has two cells.

    Attributes:
        cycle: index of the cycle, from 0.
        stage: index of the forward stage, also for its backward and its update.
        what: "forward", "backward", "update" or "idle".
        micro_batch: index of the micro-batch, from 0; None for an update and when idle.
        cost: time, 0 when idle.
    """

    cycle: int
    stage: int
    what: str
    micro_batch: Optional[int]
    cost: float


@dataclass(frozen=True)
class Schedule:
    """The cycles of one update, or of one call of inference. Times and shares count every IPU once.

    Attributes:
        name: name of the execution strategy.
        stages: costs of the stages.
        sections: for each cycle "ramp-up", "main", "ramp-down" or "update".
        cells: ordered by cycle and stage; at least one for each pair.
    """

    name: str
    stages: Tuple[StageCost, ...]
    sections: Tuple[str, ...]
    cells: Tuple[Cell, ...]

    @property
    def cycles(self) -> int:
        """Number of cycles, including that of the update."""
        return len(self.sections)

    @property
    def cycle_times(self) -> Tuple[float, ...]:
        """Time of each cycle: the work of its busiest IPU."""
        work: List[Dict[int, float]] = [{} for _ in self.sections]
        for cell in self.cells:
            ipu = self._ipu(cell.stage)
            work[cell.cycle][ipu] = work[cell.cycle].get(ipu, 0.0) + cell.cost
        return tuple(max(per_ipu.values()) for per_ipu in work)

    @property
    def time(self) -> float:
        """Time of all cycles."""
        return sum(self.cycle_times)

    @property
    def idle_share(self) -> float:
        """Share of the IPUs' time, from 0 to 1, in which they are idle."""
        available = self.time * len(set(map(self._ipu, range(len(self.stages)))))
        return 1.0 - sum(cell.cost for cell in self.cells) / available if available else 0.0

    def count(self, stage: int, what: str) -> int:
        """Return the number of cycles in which `stage` does `what`."""
        return sum(cell.stage == stage and cell.what == what for cell in self.cells)

    def _ipu(self, stage: int) -> int:
        ipu = self.stages[stage].ipu
        return stage if ipu is None else ipu


def pipelined(
    stages: Sequence[StageCost], micro_batches: int, training: bool = True, recompute: bool = False
) -> Schedule:
    """Return the schedule of a pipeline.

    Args:
        recompute: every stage but the last computes its activations again in the backward (inferred: the SDK's
            documentation does not name the stages); the time counts as work of the backward.

    Raises:
        ValueError: too few micro-batches to fill the pipeline: 2F-1 for training, F for inference.
    """
    least = pipeline_depth(len(stages), training)
    if micro_batches < least:
        raise ValueError(f"A pipeline of {len(stages)} stages needs {least} micro-batches, got {micro_batches}")
    cycles, last = [], len(stages) - 1
    for cycle in range(micro_batches + least - 1):
        work = [Cell(cycle, s, "forward", cycle - s, stages[s].forward) for s in range(len(stages))]
        for s in range(len(stages)) if training else ():
            again = stages[s].forward if recompute and s < last else 0.0
            work.append(Cell(cycle, s, "backward", cycle - (2 * last - s), stages[s].backward + again))
        cycles.append([cell for cell in work if 0 <= (cell.micro_batch or 0) < micro_batches])
    main = micro_batches - least + 1
    sections = [RAMP_UP] * (least - 1) + [MAIN] * main + [RAMP_DOWN] * (least - 1)
    return _assemble("pipelined", stages, cycles, sections, training)


def sharded(stages: Sequence[StageCost], micro_batches: int, training: bool = True) -> Schedule:
    """Return the schedule of one stage at a time: every micro-batch passes forward and backward before the next."""
    return _sequential("sharded", stages, [[stage] for stage in range(len(stages))], micro_batches, training)


def phased(stages: Sequence[StageCost], micro_batches: int, training: bool = True) -> Schedule:
    """Return the schedule of one phase at a time, its stages in parallel; off-chip transfers are not counted."""
    groups: Dict[int, List[int]] = {}
    for index, stage in enumerate(stages):
        groups.setdefault(stage.phase, []).append(index)
    return _sequential("phased", stages, list(groups.values()), micro_batches, training)


def pipeline_depth(forward_stages: int, training: bool) -> int:
    """Return the least number of micro-batches of a pipeline: 2F-1 for training, F for inference."""
    return 2 * forward_stages - 1 if training else forward_stages


def compare_strategies(stages: Sequence[StageCost], micro_batches: int, training: bool = True) -> Dict[str, Schedule]:
    """Return the schedule of every strategy by name; "pipelined" only if there are enough micro-batches."""
    found = {"sharded": sharded(stages, micro_batches, training)}
    if micro_batches >= pipeline_depth(len(stages), training):
        found["pipelined"] = pipelined(stages, micro_batches, training, recompute=training)
    if len({stage.phase for stage in stages}) > 1:
        found["phased"] = phased(stages, micro_batches, training)
    return found


def _sequential(
    name: str, stages: Sequence[StageCost], groups: Sequence[Sequence[int]], micro_batches: int, training: bool
) -> Schedule:
    """Run the groups of stages one after the other: the forward in order, the backward in the opposite order."""
    if micro_batches < 1:
        raise ValueError(f"There is at least 1 micro-batch, got {micro_batches}")
    cycles: List[List[Cell]] = []
    for micro_batch in range(micro_batches):
        for group in groups:
            cycles.append([Cell(len(cycles), s, "forward", micro_batch, stages[s].forward) for s in group])
        for group in groups[::-1] if training else ():
            cycles.append([Cell(len(cycles), s, "backward", micro_batch, stages[s].backward) for s in group])
    return _assemble(name, stages, cycles, [MAIN] * len(cycles), training)


def _assemble(
    name: str, stages: Sequence[StageCost], cycles: List[List[Cell]], sections: List[str], training: bool
) -> Schedule:
    """Append the cycle of the weight update in training, and add idle cells for stages without work."""
    if training:
        cycles.append([Cell(len(cycles), s, UPDATE, None, stage.update) for s, stage in enumerate(stages)])
        sections.append(UPDATE)
    cells = (cell for number, work in enumerate(cycles) for cell in _with_idle(number, work, len(stages)))
    return Schedule(name, tuple(stages), tuple(sections), tuple(cells))


def _with_idle(cycle: int, work: Iterable[Cell], stages: int) -> List[Cell]:
    busy = list(work)
    idle = set(range(stages)) - {cell.stage for cell in busy}
    return sorted(busy + [Cell(cycle, stage, "idle", None, 0.0) for stage in idle], key=lambda cell: cell.stage)
