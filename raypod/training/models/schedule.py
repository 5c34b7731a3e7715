"""Which pipeline stage works when: one weight update as a table of cycles and stages.

Pure functions of the stages' costs, in any unit of time, and of the number of micro-batches.

A pipeline of F forward stages has 2F-1 stages: the backward of stage s is stage 2F-2-s, and the last stage runs forward
and backward in one cycle. In every cycle each stage runs the forward of at most one micro-batch and the backward of at
most one other; the slowest IPU determines the length of the cycle. m micro-batches therefore take m + 2F - 2 cycles, of
which 2F-2 fill the pipeline and 2F-2 drain it, so gradient accumulation must be at least 2F-1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

RAMP_UP, MAIN, RAMP_DOWN, UPDATE = "ramp-up", "main", "ramp-down", "update"


@dataclass(frozen=True)
class StageCost:
    """Time of one forward stage: forward and backward of a micro-batch, and the weight update; and its IPU."""

    forward: float
    backward: float
    update: float
    ipu: int


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
    """The cycles of one update. Times and shares count every IPU once.

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
            ipu = self.stages[cell.stage].ipu
            work[cell.cycle][ipu] = work[cell.cycle].get(ipu, 0.0) + cell.cost
        return tuple(max(per_ipu.values()) for per_ipu in work)

    @property
    def time(self) -> float:
        """Time of all cycles."""
        return sum(self.cycle_times)

    @property
    def idle_share(self) -> float:
        """Share of the IPUs' time, from 0 to 1, in which they are idle."""
        available = self.time * len({stage.ipu for stage in self.stages})
        return 1.0 - sum(cell.cost for cell in self.cells) / available if available else 0.0


def pipelined(stages: Sequence[StageCost], micro_batches: int, recompute: bool = False) -> Schedule:
    """Return the schedule of a pipeline.

    Args:
        recompute: every stage but the last computes its activations again in the backward (inferred: the SDK's
            documentation does not name the stages); the time counts as work of the backward.

    Raises:
        ValueError: fewer than 2F-1 micro-batches, which fill the pipeline.
    """
    least = 2 * len(stages) - 1
    if micro_batches < least:
        raise ValueError(f"A pipeline of {len(stages)} stages needs {least} micro-batches, got {micro_batches}")
    cycles, last = [], len(stages) - 1
    for cycle in range(micro_batches + least - 1):
        work = [Cell(cycle, s, "forward", cycle - s, stages[s].forward) for s in range(len(stages))]
        for s in range(len(stages)):
            again = stages[s].forward if recompute and s < last else 0.0
            work.append(Cell(cycle, s, "backward", cycle - (2 * last - s), stages[s].backward + again))
        cycles.append([cell for cell in work if 0 <= (cell.micro_batch or 0) < micro_batches])
    main = micro_batches - least + 1
    sections = [RAMP_UP] * (least - 1) + [MAIN] * main + [RAMP_DOWN] * (least - 1)
    return _assemble("pipelined", stages, cycles, sections)


def sharded(stages: Sequence[StageCost], micro_batches: int) -> Schedule:
    """Return the schedule of one stage at a time: every micro-batch passes forward and backward before the next."""
    if micro_batches < 1:
        raise ValueError(f"There is at least 1 micro-batch, got {micro_batches}")
    cycles: List[List[Cell]] = []
    for micro_batch in range(micro_batches):
        for s, stage in enumerate(stages):
            cycles.append([Cell(len(cycles), s, "forward", micro_batch, stage.forward)])
        for s, stage in reversed(list(enumerate(stages))):
            cycles.append([Cell(len(cycles), s, "backward", micro_batch, stage.backward)])
    return _assemble("sharded", stages, cycles, [MAIN] * len(cycles))


def compare_strategies(stages: Sequence[StageCost], micro_batches: int) -> Dict[str, Schedule]:
    """Return the schedule of every strategy by name; "pipelined" only if there are enough micro-batches."""
    found = {"sharded": sharded(stages, micro_batches)}
    if micro_batches >= 2 * len(stages) - 1:
        found["pipelined"] = pipelined(stages, micro_batches, recompute=True)
    return found


def _assemble(name: str, stages: Sequence[StageCost], cycles: List[List[Cell]], sections: List[str]) -> Schedule:
    """Append the cycle of the weight update, and add idle cells for stages without work."""
    cycles.append([Cell(len(cycles), s, UPDATE, None, stage.update) for s, stage in enumerate(stages)])
    cells: List[Cell] = []
    for cycle, work in enumerate(cycles):
        idle = set(range(len(stages))) - {cell.stage for cell in work}
        work += [Cell(cycle, stage, "idle", None, 0.0) for stage in idle]
        cells += sorted(work, key=lambda cell: cell.stage)
    return Schedule(name, tuple(stages), (*sections, UPDATE), tuple(cells))
