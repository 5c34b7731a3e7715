"""Schedules of one update: small cases drawn by hand, and the formulas."""

from __future__ import annotations

from typing import Any, Dict, List, Set, Tuple

import pytest

from raypod.training.models.schedule import StageCost, compare_strategies, phased, pipelined, sharded

LETTERS = {("forward",): "f", ("backward",): "b", ("backward", "forward"): "x", ("idle",): ".", ("update",): "u"}


def equal(stages: int, update: float = 0.0) -> List[StageCost]:
    """Return stages whose forward and backward take one unit each."""
    return [StageCost(1.0, 1.0, update)] * stages


def picture(schedule: Any) -> List[str]:
    """Return one line per stage: f and b for forward and backward, x for both, u for the update, . for idle."""
    done: Dict[Tuple[int, int], Set[str]] = {}
    for cell in schedule.cells:
        done.setdefault((cell.stage, cell.cycle), set()).add(cell.what)
    letters = {place: LETTERS[tuple(sorted(what))] for place, what in done.items()}
    stages, cycles = range(len(schedule.stages)), range(schedule.cycles)
    return ["".join(letters[stage, cycle] for cycle in cycles) for stage in stages]


def test_pipelines_drawn_by_hand() -> None:
    schedule = pipelined(equal(1), 3)
    assert (picture(schedule), schedule.idle_share) == (["xxxu"], 0.0)
    assert schedule.sections == ("main", "main", "main", "update")
    schedule = pipelined(equal(2, update=0.5), 3)
    assert picture(schedule) == ["ffxbbu", ".xxx.u"]
    assert schedule.sections == ("ramp-up",) * 2 + ("main",) + ("ramp-down",) * 2 + ("update",)
    assert schedule.cycle_times == (1.0, 2.0, 2.0, 2.0, 1.0, 0.5)
    assert schedule.idle_share == pytest.approx(1 - 13 / 17)
    schedule = pipelined(equal(4), 7)
    assert picture(schedule) == ["ffffffxbbbbbbu", ".ffffxxxbbbb.u", "..ffxxxxxbb..u", "...xxxxxxx...u"]
    assert [schedule.sections.count(name) for name in ("ramp-up", "main", "ramp-down", "update")] == [6, 1, 6, 1]


def test_each_micro_batch_goes_forward_then_backward_once_on_every_stage() -> None:
    schedule = pipelined(equal(3), 8)
    for stage in range(3):
        for what in ("forward", "backward"):
            batches = [cell.micro_batch for cell in schedule.cells if (cell.stage, cell.what) == (stage, what)]
            assert batches == list(range(8))
            assert schedule.count(stage, what) == 8


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 2), (4, 4), (4, 10), (8, 100)])
def test_inference_pipeline_is_idle_while_it_fills_and_drains(stages: int, batches: int) -> None:
    schedule = pipelined(equal(stages), batches, training=False)
    assert schedule.cycles == batches + stages - 1
    assert schedule.sections.count("main") == batches - stages + 1
    assert schedule.idle_share == pytest.approx((stages - 1) / (batches + stages - 1))


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 3), (3, 7), (4, 20)])
@pytest.mark.parametrize("training", [True, False])
def test_one_sharded_stage_works_at_a_time(stages: int, batches: int, training: bool) -> None:
    schedule = sharded(equal(stages), batches, training)
    assert schedule.time == batches * stages * (1 + training)
    assert schedule.cycles == schedule.time + training
    assert schedule.idle_share == pytest.approx(1 - 1 / stages)
    assert picture(sharded(equal(2), 2)) == ["f..bf..bu", ".fb..fb.u"]  # backward before the next micro-batch


@pytest.mark.parametrize(
    ("stages", "batches", "times", "idle"),
    [
        ([StageCost(3.0), StageCost(1.0)], 2, (3.0, 3.0, 1.0), 1 - 8 / 14),  # the slowest IPU determines the time
        # Stages on one IPU run one after the other.
        ([StageCost(1.0, ipu=ipu) for ipu in (0, 1, 0)], 3, (1.0, 1.0, 2.0, 1.0, 1.0), 1 - 9 / 12),
    ],
)
def test_times_of_cycles(stages: List[StageCost], batches: int, times: Tuple[float, ...], idle: float) -> None:
    schedule = pipelined(stages, batches, training=False)
    assert (schedule.cycle_times, schedule.idle_share) == (times, pytest.approx(idle))


def test_phases_recomputation_and_the_comparison() -> None:
    stages = [StageCost(1.0, 1.0, phase=phase) for phase in (0, 0, 1)]
    assert picture(phased(stages, 1)) == ["f..bu", "f..bu", ".fb.u"]
    costs = {cell.stage: cell.cost for cell in pipelined(equal(2), 3, recompute=True).cells if cell.what == "backward"}
    assert costs == {0: 2.0, 1: 1.0}
    both = compare_strategies(equal(2), 8)
    assert set(both) == {"sharded", "pipelined"}
    assert both["pipelined"].idle_share < both["sharded"].idle_share
    assert set(compare_strategies(equal(2), 2)) == {"sharded"}
    phases = compare_strategies([StageCost(1.0, phase=0), StageCost(1.0, phase=1)], 8)
    assert set(phases) == {"sharded", "pipelined", "phased"}
    for make, batches in ((pipelined, 2), (sharded, 0), (phased, 0)):
        with pytest.raises(ValueError, match=f"got {batches}"):
            make(equal(2), batches)
