"""Checkpoints at time intervals, with a scripted fleet that loads its data slower than the interval."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Iterator, List, Optional

import pytest

from raypod.checkpoint.format import Checkpoint
from raypod.checkpoint.resume import manifest_of
from raypod.checkpoint.storage import checkpoint_path, checkpoints_folder, new_checkpoint, write_manifest
from raypod.coordinator import coordinator
from raypod.events import CallReport, RunEnded, UpdateDone
from raypod.fleet.scripted import ScriptedFleet
from raypod.plan.plan import Leg, Plan
from raypod.record.metrics import MetricsAggregator

INTERVAL_S = 0.06
UPDATES, POLLS, MOST_LEGS = 6, 3, 50


class LoadsSlowly(ScriptedFleet):
    """Polls for a stop several times before the first call of a leg, which takes longer than the interval."""

    legs = 0

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        self.legs += 1
        assert self.legs < MOST_LEGS, "the run makes no progress"
        for _ in range(POLLS):
            time.sleep(INTERVAL_S / 2)
            if stop_requested():
                return
        yield from super().run(leg, stop_requested)


@pytest.mark.parametrize("resumed_at", [None, 2])
def test_data_that_loads_slower_than_the_checkpoint_interval_is_trained_on(
    make: Callable[..., Plan], resumed_at: Optional[int]
) -> None:
    run: Any = {"checkpoint_every": f"{INTERVAL_S / 60} minutes"}
    plan = make(training={"updates": UPDATES}, pod={"num_instances": 2}, run=run)
    resumed: Optional[Checkpoint] = None
    if resumed_at is not None:
        checkpoints = checkpoints_folder(plan.run_dir)
        manifest = dataclasses.replace(manifest_of(plan, resumed_at, 1, "", {}), weights_sha256="0" * 64)
        with new_checkpoint(checkpoints, resumed_at) as partial:
            write_manifest(partial, manifest)
        resumed = Checkpoint(checkpoint_path(checkpoints, resumed_at), manifest)
    fleet = LoadsSlowly(plan)
    events = list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), resumed))
    updates: List[int] = [event.update for event in events if isinstance(event, UpdateDone)]
    assert updates == list(range(1 + (resumed_at or 0), UPDATES + 1))
    assert fleet.called.count("save") >= 2
    assert isinstance(events[-1], RunEnded)
