"""The run, told from top to bottom: start, seed the weights, run the legs, evaluate, end.

Data comes up as reports of the instances and goes on as events to whoever iterates over `run`. No collective and no
file of the run stands between two updates.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from types import FrameType
from typing import Dict, Generator, Iterator, List, Optional

from raypod import checkpoint
from raypod.checkpoint import Checkpoint
from raypod.errors import RunError, WeightsDiffer
from raypod.events import (
    CheckpointSaved,
    EvaluationDone,
    EvaluationReport,
    Event,
    InstanceStarted,
    RunEnded,
    RunStarted,
)
from raypod.fleet import Fleet
from raypod.metrics import MetricsFold
from raypod.plan import Leg, Plan
from raypod.seeding import new_seeding

Events = Generator[Event, None, None]


def run(plan: Plan, fleet: Fleet, metrics: MetricsFold, resumed: Optional[Checkpoint] = None) -> Events:
    """Run a plan on a fleet; the events of the run, as they happen."""
    update = first_update = resumed.position.update if resumed else 0
    with _stop_on_signal() as stop, contextlib.closing(fleet):
        started = fleet.start()
        _seed_weights(fleet, resumed)
        yield _run_started(started, fleet, first_update)
        with stop.at_a_checkpoint():
            for leg in plan.legs(first_update):
                yield from _train(fleet, leg, metrics, stop)
                update = metrics.last.update if metrics.last else first_update
                if leg.ends_epoch and update == leg.first_update + leg.num_updates:
                    yield metrics.end_epoch(leg.epoch)
                saved = _save(plan, fleet, update)
                yield saved
                if plan.is_evaluated_after(leg) and not stop.requested:
                    yield _evaluate(fleet, update, leg)
                if stop.requested:
                    break
        if update == plan.total_updates and plan.size.test_samples:
            yield _evaluate(fleet, update, leg)
        yield RunEnded(update, update < plan.total_updates, saved.weights_sha256, saved.path)


def _seed_weights(fleet: Fleet, resumed: Optional[Checkpoint]) -> None:
    """All instances start from the state of instance 0, fresh or out of a checkpoint; proved by the hash of each."""
    seeding = new_seeding(fleet.call("open_seeding"))
    hashes = fleet.call("seed_weights", seeding, str(resumed.path) if resumed else None)
    if len(set(hashes)) > 1:
        raise WeightsDiffer(dict(enumerate(hashes)))
    if resumed is not None and hashes[0] != resumed.position.weights_sha256:
        raise RunError(f"{resumed.path} is damaged: the hash of its weights is not the one it was saved with")


def _train(fleet: Fleet, leg: Leg, metrics: MetricsFold, stop: _Stop) -> Iterator[Event]:
    metrics.begin_leg(time.monotonic())
    for report in fleet.run(leg, lambda: stop.requested):
        yield from metrics.add(report, leg, time.monotonic())


def _save(plan: Plan, fleet: Fleet, update: int) -> CheckpointSaved:
    path = checkpoint.weights_path(plan, update)
    weights_sha256 = fleet.call("save", str(path))[0]
    checkpoint.commit(plan, update, weights_sha256)
    return CheckpointSaved(update, str(path), weights_sha256)


def _evaluate(fleet: Fleet, update: int, leg: Leg) -> EvaluationDone:
    reports: List[EvaluationReport] = fleet.call("evaluate")
    samples = sum(report.samples for report in reports)
    loss = math.fsum(report.loss_sum for report in reports) / samples
    accuracy = 100.0 * sum(report.correct for report in reports) / samples
    return EvaluationDone(samples, loss, accuracy, update, leg.epoch + 1)


def _run_started(started: List[InstanceStarted], fleet: Fleet, first_update: int) -> RunStarted:
    first = started[0]
    slowest: Dict[str, float] = {}
    for instance in started:
        for what, seconds in instance.seconds:
            slowest[what] = max(seconds, slowest.get(what, 0.0))
    steps = (*fleet.start_seconds, *((f"in the instances: {what}", value) for what, value in slowest.items()))
    return RunStarted(first.device, first.device_line, first_update, first.parameters, steps)


class _Stop:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.requested = False
        self._waits = False

    @contextlib.contextmanager
    def at_a_checkpoint(self) -> Iterator[None]:
        """Meanwhile a request waits until the calls under way are done and saved."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """The handler."""
        if self.requested or not self._waits:
            raise KeyboardInterrupt
        self.requested = True


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """Ctrl-C and SIGTERM end the run: while it trains after a checkpoint, at the second time and else at once."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
