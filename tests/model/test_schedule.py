"""Schedules of one update: small cases drawn by hand, and the formulas."""

from __future__ import annotations

import pytest

from raypod.model.schedule import StageCost, compare_strategies, phased, pipelined, sharded


def equal(stages, update=0.0):
    """Return stages whose forward and backward take one unit each."""
    return [StageCost(1.0, 1.0, update)] * stages


def picture(schedule):
    """Return one line per stage: f and b for forward and backward, x for both, u for the update, . for idle."""
    letters = {frozenset(["forward"]): "f", frozenset(["backward"]): "b", frozenset(["forward", "backward"]): "x"}
    letters.update({frozenset(["idle"]): ".", frozenset(["update"]): "u"})
    done = {}
    for cell in schedule.cells:
        done.setdefault((cell.stage, cell.cycle), set()).add(cell.what)
    stages = range(len(schedule.stages))
    return ["".join(letters[frozenset(done[stage, cycle])] for cycle in range(schedule.cycles)) for stage in stages]


def test_one_stage_is_never_idle():
    schedule = pipelined(equal(1), 3)
    assert picture(schedule) == ["xxxu"]
    assert schedule.sections == ("main", "main", "main", "update")
    assert schedule.idle_share == 0.0


def test_two_stages_and_three_micro_batches():
    schedule = pipelined(equal(2, update=0.5), 3)
    assert picture(schedule) == ["ffxbbu", ".xxx.u"]
    assert schedule.sections == ("ramp-up",) * 2 + ("main",) + ("ramp-down",) * 2 + ("update",)
    assert schedule.cycle_times == (1.0, 2.0, 2.0, 2.0, 1.0, 0.5)
    assert schedule.idle_share == pytest.approx(1 - 13 / 17)


def test_four_stages_and_seven_micro_batches():
    schedule = pipelined(equal(4), 7)
    assert picture(schedule) == [
        "ffffffxbbbbbbu",
        ".ffffxxxbbbb.u",
        "..ffxxxxxbb..u",
        "...xxxxxxx...u",
    ]
    assert [schedule.sections.count(name) for name in ("ramp-up", "main", "ramp-down", "update")] == [6, 1, 6, 1]


def test_each_micro_batch_goes_forward_then_backward_once_on_every_stage():
    schedule = pipelined(equal(3), 8)
    for stage in range(3):
        for what in ("forward", "backward"):
            batches = [cell.micro_batch for cell in schedule.cells if (cell.stage, cell.what) == (stage, what)]
            assert batches == list(range(8))
            assert schedule.count(stage, what) == 8


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 2), (4, 4), (4, 10), (8, 100)])
def test_inference_pipeline_is_idle_while_it_fills_and_drains(stages, batches):
    schedule = pipelined(equal(stages), batches, training=False)
    assert schedule.cycles == batches + stages - 1
    assert schedule.sections.count("main") == batches - stages + 1
    assert schedule.idle_share == pytest.approx((stages - 1) / (batches + stages - 1))


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 3), (3, 7), (4, 20)])
@pytest.mark.parametrize("training", [True, False])
def test_one_sharded_stage_works_at_a_time(stages, batches, training):
    schedule = sharded(equal(stages), batches, training)
    passes = 2 if training else 1
    assert schedule.cycles == batches * stages * passes + training
    assert schedule.time == batches * stages * passes
    assert schedule.idle_share == pytest.approx(1 - 1 / stages)


def test_sharded_training_runs_backward_before_the_next_micro_batch():
    assert picture(sharded(equal(2), 2)) == ["f..bf..bu", ".fb..fb.u"]


def test_slowest_ipu_determines_the_cycle_time():
    uneven = [StageCost(3.0), StageCost(1.0)]
    schedule = pipelined(uneven, 2, training=False)
    assert schedule.cycle_times == (3.0, 3.0, 1.0)
    assert schedule.idle_share == pytest.approx(1 - 8 / 14)


def test_stages_on_one_ipu_run_sequentially():
    back = [StageCost(1.0, ipu=0), StageCost(1.0, ipu=1), StageCost(1.0, ipu=0)]
    schedule = pipelined(back, 3, training=False)
    assert schedule.cycle_times == (1.0, 1.0, 2.0, 1.0, 1.0)
    assert schedule.idle_share == pytest.approx(1 - 9 / 12)


def test_stages_of_a_phase_run_in_parallel():
    stages = [StageCost(1.0, 1.0, phase=0), StageCost(1.0, 1.0, phase=0), StageCost(1.0, 1.0, phase=1)]
    assert picture(phased(stages, 1)) == ["f..bu", "f..bu", ".fb.u"]


def test_recomputation_adds_a_forward_to_all_but_the_last_stage():
    costs = {cell.stage: cell.cost for cell in pipelined(equal(2), 3, recompute=True).cells if cell.what == "backward"}
    assert costs == {0: 2.0, 1: 1.0}


def test_compare_strategies():
    both = compare_strategies(equal(2), 8)
    assert set(both) == {"sharded", "pipelined"}
    assert both["pipelined"].idle_share < both["sharded"].idle_share
    assert set(compare_strategies(equal(2), 2)) == {"sharded"}
    assert set(compare_strategies([StageCost(1.0, phase=0), StageCost(1.0, phase=1)], 8)) == {
        "sharded",
        "pipelined",
        "phased",
    }


@pytest.mark.parametrize(("make", "batches"), [(pipelined, 2), (sharded, 0), (phased, 0)])
def test_too_few_micro_batches_raise_value_error(make, batches):
    with pytest.raises(ValueError, match=f"got {batches}"):
        make(equal(2), batches)
