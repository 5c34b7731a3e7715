"""The run, told from top to bottom: start, seed the weights, run the legs, evaluate, end.

Data comes up as reports of the instances and goes on as events to whoever iterates over `run`. No collective and no
file of the run stands between two updates.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from functools import partial
from types import FrameType
from typing import Dict, Generator, Iterator, List, Optional, Sequence

from raypod.checkpoint.format import Checkpoint
from raypod.checkpoint.resume import check_data
from raypod.coordinator.checkpoint_schedule import Saving
from raypod.coordinator.recovery import Repairs, seed
from raypod.errors import ConfigError
from raypod.events import (
    EvaluationDone,
    EvaluationReport,
    Event,
    InstanceStarted,
    RunEnded,
    RunStarted,
)
from raypod.fleet.base import Fleet
from raypod.plan.plan import Leg, Plan
from raypod.record.metrics import MetricsFold

Events = Generator[Event, None, None]


def run(
    plan: Plan,
    fleet: Fleet,
    metrics: MetricsFold,
    resumed: Optional[Checkpoint] = None,
    known: Sequence[EvaluationDone] = (),
) -> Events:
    """Run a plan on a fleet; the events of the run, as they happen.

    `known`: the evaluations that a resumed run had made before.
    """
    first_update = resumed.update if resumed else 0
    with _stop_on_signal() as stop, contextlib.closing(fleet):
        started = fleet.start()
        _check_data(plan, started, resumed)
        seed(fleet, resumed)
        metrics.settle(first_update, time.monotonic())
        saving = Saving(plan, started[0], resumed)
        repairs = Repairs(plan, fleet, metrics, saving, started[0].device, resumed)
        evaluations = Evaluations(plan, fleet, saving, known)
        yield _run_started(started, fleet, first_update, saving.generation)
        # The one that a stop at the end of an epoch, or a kill, has left undone.
        yield from repairs.until_done(first_update, partial(evaluations.after, first_update))
        done = -1
        while done != metrics.position:  # whoever loses everybody goes on from an older update
            with stop.at_a_checkpoint():
                while metrics.position < plan.total_updates and not stop.requested:
                    leg = plan.next_leg(metrics.position)
                    yield from repairs.once(_train(fleet, leg, metrics, saving, stop))
                    update = metrics.position
                    if leg.ends_epoch and update == leg.end and leg.epoch >= metrics.epochs_done:
                        yield metrics.end_epoch(leg.epoch)
                    if update < plan.total_updates and not stop.requested:
                        yield from repairs.until_done(update, partial(evaluations.after, update))
                    accuracy = evaluations.accuracy_after(update)
                    leaving = stop.hosts_to_leave(fleet, repairs) if update < plan.total_updates else []
                    if saving.is_due(update) or accuracy is not None or stop.requested or leaving:
                        yield from repairs.until_done(update, partial(saving.begin, fleet, update, accuracy))
                    if leaving:
                        yield from repairs.until_done(update, partial(_finish_saving, fleet, update, saving))
                        yield from repairs.move(leaving)
                done = metrics.position
                yield from repairs.until_done(done, partial(_finish_saving, fleet, done, saving))
            if done == plan.total_updates:
                yield from repairs.until_done(done, partial(evaluations.after, done))
        assert saving.last is not None, "a run ends with a checkpoint"
        yield RunEnded(done, done < plan.total_updates, saving.last.weights_sha256, saving.last.path, stop.cause)


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


def _train(fleet: Fleet, leg: Leg, metrics: MetricsFold, saving: Saving, stop: _Stop) -> Iterator[Event]:
    metrics.begin_leg(time.monotonic())
    for report in fleet.run(leg, lambda: stop.requested or bool(fleet.draining()) or saving.is_late()):
        yield from map(saving.take, report.saves)
        updates = metrics.add(report, time.monotonic())
        yield from metrics.take_calls()
        for update in updates:
            yield update
            saving.check_finite(update)


def _finish_saving(fleet: Fleet, update: int, saving: Saving) -> Iterator[Event]:
    yield from saving.begin(fleet, update)  # without effect if it has begun already
    yield from saving.finish(fleet)


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
        self.cause = ""
        self._waits = self._signalled = False

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
        if self._signalled or not self._waits:
            raise KeyboardInterrupt
        self.requested = self._signalled = True

    def hosts_to_leave(self, fleet: Fleet, repairs: Repairs) -> List[str]:
        """The hosts that are about to be taken away, if their instances can live elsewhere: else the run is to stop."""
        draining = fleet.draining() if not self.requested else []
        if draining and not repairs.can_move(draining):
            self.requested, self.cause = True, f"Ray drains host {', '.join(draining)}"
            return []
        return draining


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


# --- from evaluations: The evaluations of a run: when they are due, what they found, and that each is made once.


class Evaluations:
    """Of one run. After as many updates the weights are the same, so what is known is not found again."""

    def __init__(self, plan: Plan, fleet: Fleet, saving: Saving, known: Sequence[EvaluationDone]) -> None:
        """`known`: those that the run had made before it went on."""
        self._plan, self._fleet, self._saving = plan, fleet, saving
        self._found = {each.update: each for each in known}

    def after(self, update: int) -> Iterator[Event]:
        """Evaluate after `update` updates, if that is due and has not been done."""
        if not self._plan.is_evaluated_after(update) or update in self._found:
            return
        reports: List[EvaluationReport] = self._fleet.call("evaluate")
        samples = sum(report.samples for report in reports)
        loss = math.fsum(report.loss_sum for report in reports) / samples
        accuracy = 100.0 * sum(report.correct for report in reports) / samples
        epoch = (update - 1) // self._plan.updates_per_epoch + 1
        self._found[update] = EvaluationDone(samples, loss, accuracy, update, epoch)
        self._saving.add_accuracy(update, accuracy)
        yield self._found[update]

    def accuracy_after(self, update: int) -> Optional[float]:
        """The test accuracy after `update` updates, in percent; None where it is not known."""
        found = self._found.get(update)
        return found.accuracy if found else None
