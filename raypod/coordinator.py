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

from raypod.checkpoint.manifest import Checkpoint
from raypod.checkpoint.reader import check_data
from raypod.errors import CheckpointDamaged, ConfigError, WeightsDiffer
from raypod.events import (
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
from raypod.saving import Saving
from raypod.seeding import new_seeding

Events = Generator[Event, None, None]


def run(plan: Plan, fleet: Fleet, metrics: MetricsFold, resumed: Optional[Checkpoint] = None) -> Events:
    """Run a plan on a fleet; the events of the run, as they happen."""
    update = first_update = resumed.update if resumed else 0
    with _stop_on_signal() as stop, contextlib.closing(fleet):
        started = fleet.start()
        _check_data(plan, started, resumed)
        _seed_weights(fleet, resumed)
        saving = Saving(plan, started[0], resumed)
        yield _run_started(started, fleet, first_update, saving.generation)
        with stop.at_a_checkpoint():
            while update < plan.total_updates and not stop.requested:
                leg = plan.next_leg(update)
                yield from _train(fleet, leg, metrics, saving, stop)
                update = metrics.last.update if metrics.last else first_update
                if leg.ends_epoch and update == leg.end:
                    yield metrics.end_epoch(leg.epoch)
                test_accuracy = None
                if update == leg.end and plan.is_evaluated_after(leg) and not stop.requested:
                    evaluation = _evaluate(fleet, update, leg)
                    yield evaluation
                    test_accuracy = evaluation.accuracy
                if saving.is_due(update) or stop.requested:
                    yield from saving.begin(fleet, update, test_accuracy)
            yield from saving.finish(fleet)
        if update == plan.total_updates and plan.size.test_samples:
            yield _evaluate(fleet, update, leg)
        assert saving.last is not None, "a run ends with a checkpoint"
        yield RunEnded(update, update < plan.total_updates, saving.last.weights_sha256, saving.last.path)


def _check_data(plan: Plan, started: List[InstanceStarted], resumed: Optional[Checkpoint]) -> None:
    """All instances see the same data, and that of the checkpoint."""
    first = started[0]
    for other in started:
        if other.data_fingerprint != first.data_fingerprint:
            raise ConfigError(
                f"the data set of instance {other.instance} on host {other.host} is not that of instance "
                f"{first.instance} on host {first.host}: fingerprints {other.data_fingerprint} and "
                f"{first.data_fingerprint}; copy one to all hosts"
            )
    if resumed is not None:
        check_data(plan, resumed, first.data_fingerprint)


def _seed_weights(fleet: Fleet, resumed: Optional[Checkpoint]) -> None:
    """All instances start from the state of instance 0, fresh or out of a checkpoint; proved by the hash of each."""
    seeding = new_seeding(fleet.call("open_seeding"))
    hashes = fleet.call("seed_weights", seeding, str(resumed.path) if resumed else None)
    if len(set(hashes)) > 1:
        raise WeightsDiffer(dict(enumerate(hashes)))
    if resumed is not None and hashes[0] != resumed.manifest.weights_sha256:
        raise CheckpointDamaged(str(resumed.path), "the hash of its weights is not the one it was saved with")


def _train(fleet: Fleet, leg: Leg, metrics: MetricsFold, saving: Saving, stop: _Stop) -> Iterator[Event]:
    metrics.begin_leg(time.monotonic())
    for report in fleet.run(leg, lambda: stop.requested or saving.is_late()):
        yield from map(saving.take, report.saves)
        updates = metrics.add(report, leg, time.monotonic())
        if updates and metrics.last_call is not None:
            yield metrics.last_call
        for update in updates:
            yield update
            saving.check_finite(update)


def _evaluate(fleet: Fleet, update: int, leg: Leg) -> EvaluationDone:
    reports: List[EvaluationReport] = fleet.call("evaluate")
    samples = sum(report.samples for report in reports)
    loss = math.fsum(report.loss_sum for report in reports) / samples
    accuracy = 100.0 * sum(report.correct for report in reports) / samples
    return EvaluationDone(samples, loss, accuracy, update, leg.epoch + 1)


def _run_started(started: List[InstanceStarted], fleet: Fleet, first_update: int, generation: int) -> RunStarted:
    first = started[0]
    slowest: Dict[str, float] = {}
    for instance in started:
        for what, seconds in instance.seconds:
            slowest[what] = max(seconds, slowest.get(what, 0.0))
    steps = (*fleet.start_seconds, *((f"in the instances: {what}", value) for what, value in slowest.items()))
    return RunStarted(first.device, first.device_line, first_update, first.parameters, steps, generation)


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
