"""What stops a run early: a signal, the caller, a host that Ray drains, a preemption, or evaluations without progress.

A preemption is announced by SIGUSR1, and by SIGTERM if one of the `--preemption` flags is given. With
`--preemption-grace-s` the process ends within that time, at the latest by `Stop.end_now`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Callable, Collection, Iterable, Iterator, NoReturn, Optional

from raypod.errors import Preempted, summarize_exception
from raypod.events import EvaluationDone, StoppedEarly
from raypod.plan.metric import Metric
from raypod.plan.plan import Plan
from raypod.plan.sections import RunSection
from raypod.system.command_line import INTERRUPTED
from raypod.system.signals import (
    SignalDeadline,
    SignalFilter,
    abort,
    cancel_abort,
    leave_terminal,
    preemption_signals,
    stop_signals,
    time_to_end,
    unreported_if_ignored,
)

_RECORDING_S = 0.3  # for the files to record the end: a disk that hangs must not keep the process from ending in time
# What a signal does, and whether the approaching deadline interrupts the main thread.
_AT_ONCE, _DEFERRED, _SAVING, _ENDING = "raise", "request a stop", "request a stop, uninterrupted", "ignore a notice"


class Stop:
    """Whether a stop of the run was requested, and why. `cause` is empty for a signal.

    Attributes:
        requested: the run must stop after the calls in progress.
        is_signalled: a signal requested that.
        is_preempted: a preemption did.
        has_deadline: this process ends within `grace_s` after a notice.
        grace_s: time from the notice of a preemption to the end of the process; None for no limit.
        exit_code: of a run that a preemption ends.
        abandon_loading: called on a notice during training that has a deadline; it may raise an exception.
        describe: returns what an end without another checkpoint means for the run, for messages. Called in any thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self.cause = ""
        self.is_signalled = self.is_preempted = False
        self.grace_s: Optional[float] = None
        self.exit_code = INTERRUPTED
        self.describe: Callable[[], str] = lambda: "repeat the command"
        self.abandon_loading: Callable[[], None] = lambda: None
        self.has_deadline = False
        self._notices: Collection[int] = (signal.SIGUSR1,)
        self._drain_is_preemption = False
        self._mode = _AT_ONCE
        self._raised: Optional[KeyboardInterrupt] = None
        self._is_late = self._is_noticed = False
        self._noticed_s = 0.0
        self._filter = SignalFilter()

    def configure(self, run: RunSection) -> None:
        """Set what is a preemption, and what it does, for a run that has not started yet."""
        self.describe = lambda: "nothing had started; repeat the command"
        self.grace_s = run.preemption_grace_s
        self.exit_code = INTERRUPTED if run.preemption_exit_code is None else run.preemption_exit_code
        if run.preemption_grace_s is not None or run.preemption_exit_code is not None:
            self._notices, self._drain_is_preemption = preemption_signals(), True

    @property
    def must_leave(self) -> bool:
        """Whether everything but the checkpoint must be abandoned: a preemption with a deadline was announced."""
        return self._is_noticed and self.grace_s is not None

    def seconds_left(self) -> Optional[float]:
        """Return the time until the end of the run is enforced after a notice; None if there is no deadline."""
        if not self.must_leave or self.grace_s is None:
            return None
        return self.grace_s - (time.monotonic() - self._noticed_s) - time_to_end(self.grace_s)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this context a signal takes effect after the calls in progress are done and saved."""
        self.check()
        with self._in_mode(_DEFERRED):
            yield

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, which is one of `deferred`, a checkpoint has all of the time that is left."""
        with self._in_mode(_SAVING):
            yield

    def begin_end(self) -> None:
        """From now on the run ends anyway: a preemption changes nothing but the time that it has."""
        self._mode = _ENDING

    @contextlib.contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has: Python ignores exceptions in finalizers and other callbacks."""
        if self._raised is not None:
            raise self._raised

    def request(self, cause: str, is_drained: bool = False) -> None:
        """Stop without a signal; `cause` is the reason. `is_drained`: Ray drains a host."""
        self.requested = True
        self.cause = "" if self.is_signalled else self.cause or cause
        self.is_preempted = self.is_preempted or (is_drained and self._drain_is_preemption)

    def leave(self) -> NoReturn:
        """End the run without its last checkpoint, as its stop was requested. KeyboardInterrupt, or Preempted."""
        self._raised = self._interruption()
        raise self._raised

    def on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """Handle a signal that requests a stop."""
        cancel_abort()
        if number == signal.SIGHUP:
            leave_terminal()
        if self._is_late:
            if self._mode in (_AT_ONCE, _DEFERRED):
                self.leave()
            return
        if self._filter.is_copy():
            return
        if number in self._notices and self._is_handled_notice():
            return
        if self.is_signalled or self._mode in (_AT_ONCE, _ENDING):
            self.leave()
        self.requested = self.is_signalled = True
        if self.must_leave and self._mode == _DEFERRED:
            self.abandon_loading()

    def _is_handled_notice(self) -> bool:
        """Handle the notice of a preemption; return whether nothing else is to be done.

        A repeated one shortens no grace period: Slurm sends SIGTERM after the signal of `--signal`.
        """
        is_repeated, self._is_noticed = self._is_noticed, True
        self._noticed_s = self._noticed_s if is_repeated else time.monotonic()
        self.is_preempted = self.is_preempted or not self.is_signalled
        if self.is_signalled or is_repeated:
            return self.grace_s is not None
        return self._mode == _ENDING

    def interrupt_late(self) -> None:
        """Interrupt what the main thread does, unless it writes a checkpoint or ends the run. Called in a thread."""
        self._is_late = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def end_now(self) -> None:
        """End this process. Called in a thread."""
        self.is_preempted = self._is_late = True
        last = threading.Timer(_RECORDING_S, os._exit, (self.exit_code,))
        last.daemon = True
        last.start()
        interruption = self._interruption()
        assert isinstance(interruption, Preempted), "is_preempted was set"
        abort(interruption)

    def _interruption(self) -> KeyboardInterrupt:
        if not self.is_preempted:
            return KeyboardInterrupt()
        when = f"the {self.grace_s:g} s of --preemption-grace-s end; " if self._is_late else ""
        try:
            state = self.describe()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not keep the process from ending in time
            state = f"the state of the run is unknown ({summarize_exception(error)})"
        return Preempted(f"preempted: {when}{state}", self.exit_code)


@contextlib.contextmanager
def stop_on_signal(stop: Stop) -> Iterator[None]:
    """End the run on a stop signal: during training after a checkpoint; otherwise, or if repeated, at once.

    Only the main thread can set signal handlers; in another one the context has no effect. It can be nested.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {*stop_signals(), *preemption_signals()}
    before = {number: signal.signal(number, stop.on_signal) for number in numbers}
    try:
        with unreported_if_ignored(KeyboardInterrupt):
            yield
    except KeyboardInterrupt:
        stop.check()  # Ray raises a KeyboardInterrupt of its own in place of that of a signal handler
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deadline_of(stop: Stop) -> Iterator[None]:
    """End this process within `stop.grace_s` after the notice of a preemption, if that is set.

    As `stop_on_signal`, the context has no effect outside the main thread, and can be nested.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if stop.grace_s is None or stop.has_deadline or not is_main:
        yield
        return
    with stop_on_signal(stop):
        deadline = SignalDeadline(preemption_signals(), stop.grace_s, stop.interrupt_late, stop.end_now)
        stop.has_deadline = True
        try:
            yield
        finally:
            deadline.close()
            stop.has_deadline = False


def early_stop(plan: Plan, evaluations: Iterable[EvaluationDone]) -> Optional[StoppedEarly]:
    """Return how the evaluations end a run before its last update; None if they do not.

    Only the evaluations of `--evaluate-every` count: a run that was resumed may have others, of its earlier ends.
    """
    patience = plan.patience
    if patience is None:
        return None
    every = (plan.config.training.evaluate_every or 1) * plan.updates_per_epoch
    counted = [each for each in evaluations if each.update % every == 0 and each.update < plan.total_updates]
    return first_stop(plan.early_stopping_metric, patience, counted)


def first_stop(metric: Metric, patience: int, evaluations: Iterable[EvaluationDone]) -> Optional[StoppedEarly]:
    """Return the first point after which `patience` evaluations in a row were not better than the best before them.

    NaN is the worst value, and so is infinity: `evaluations.jsonl`, from which a resumed run decides, has no infinity.
    """
    best: Optional[EvaluationDone] = None
    without_improvement = 0
    for each in sorted(evaluations, key=lambda evaluation: evaluation.update):
        if best is None or metric.is_better(*(_recorded(one.metrics[metric.name]) for one in (each, best))):
            best, without_improvement = each, 0
            continue
        without_improvement += 1
        if without_improvement == patience:
            return StoppedEarly(each.update, metric.name, patience, best.update, _recorded(best.metrics[metric.name]))
    return None


def _recorded(value: float) -> float:
    return value if math.isfinite(value) else math.nan
