"""Observe and stop an instance from another thread or process: the heartbeat and the stop gate."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from typing import Iterator, List, Optional

from raypod.errors import CollectiveBroken, WaitTimedOut
from raypod.events import HeartbeatReport
from raypod.system import spans
from raypod.system.activity_record import ActivityRecord
from raypod.system.process import cpu_seconds
from raypod.system.sdk import telemetry
from raypod.system.usage import HostMeter

IDLE = "idle"
LOADING = "loading data"
RETRYING = "waiting to load data again"
SNAPSHOT = "taking a snapshot"
ATTACHING = "attaching the device"  # again, after an evaluation or a repair; that loads the program


class Heartbeat:
    """The current activity of one instance, and since when. Its working thread sets it; other threads may read it."""

    def __init__(self, instance: int, reports_host: bool = False) -> None:
        """`reports_host`: the heartbeats contain the usage of this host."""
        self.instance = instance
        self._host_meter = HostMeter() if reports_host else None
        self._activity = (IDLE, time.monotonic())  # one attribute, so that other threads read a consistent pair
        self._calls_s: List[float] = []  # seconds of the first call, and of the slowest later one
        self._calls_done = 0
        self._thread: Optional[int] = None
        self._record: Optional[ActivityRecord] = None

    def write_to(self, record: ActivityRecord) -> None:
        """Write every change of the activity to a record, too."""
        self._record = record
        self._set(*self._activity)

    @contextlib.contextmanager
    def set_activity(self, activity: str) -> Iterator[None]:
        """Set the activity within the block; restore the previous one afterwards."""
        before = self._activity[0]
        self._thread = threading.get_ident()
        self._set(activity, time.monotonic())
        try:
            with spans.measured(activity, _category(activity)):
                yield
        finally:
            self._set(before, time.monotonic())

    @contextlib.contextmanager
    def in_call(self, number: int) -> Iterator[None]:
        """Set the activity to call `number` (0-based) within the block, and measure the call."""
        began = time.monotonic()
        with self.set_activity(f"in call {number + 1}"):
            yield
        seconds = time.monotonic() - began
        self._calls_done += 1
        # The first call includes the compilation, so it is dropped as soon as there is another one.
        self._calls_s = [seconds] if not self._calls_s else [self._calls_s[0], max([seconds, *self._calls_s[1:]])]

    def beat(self) -> HeartbeatReport:
        """Return the current record; callable from any thread."""
        activity, since_s = self._activity
        seconds = time.monotonic() - since_s
        cpu_s, waits = cpu_seconds(_own_threads()), self.waits_for_others()
        usage = self._host_meter.measure() if self._host_meter is not None else None
        slowest = self._slowest_call_s
        return HeartbeatReport(self.instance, activity, seconds, self._calls_done, slowest, waits, cpu_s, usage)

    @property
    def _slowest_call_s(self) -> Optional[float]:
        return self._calls_s[-1] if self._calls_s else None

    def _set(self, activity: str, since_s: float) -> None:
        self._activity = (activity, since_s)
        if self._record is not None:
            self._record.write(activity, since_s, self._calls_done, self._slowest_call_s, threading.get_native_id())

    @property
    def is_loading(self) -> bool:
        """Whether the instance waits for data."""
        return self._activity[0] in (LOADING, RETRYING)

    def stack(self) -> str:
        """Return the stack of the working thread as in a traceback; "" before it has started working."""
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def waits_for_others(self) -> bool:
        """Return whether the working thread waits for other instances, as far as the SDK knows (`telemetry`)."""
        return self._thread is not None and telemetry.waits_for_others(self._thread)


def _category(activity: str) -> str:
    """Return the category of an activity in a profile."""
    if activity in (LOADING, RETRYING):
        return "data wait"
    return "call" if activity.startswith("in call") else "phase"


def _own_threads() -> List[int]:
    """Return the native ids of the threads that Python code started; Ray's threads handle messages all the time."""
    threads = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    return [each.native_id for each in threads if each is not threading.main_thread() and each.native_id is not None]


class StopGate:
    """Ends a segment after the same call in every instance, on request of another thread.

    Every update is a collective, so all instances must stop after the same call, but a stop request reaches them at
    different times. Therefore each instance first pauses and reports how many calls it has started; the coordinator
    then sends the maximum to all.
    """

    def __init__(self, timeout_s: float) -> None:
        self._condition = threading.Condition()
        self._timeout_s = timeout_s
        self._paused = False
        self._last: Optional[int] = None
        self._started = 0

    def enter(self, call: int) -> bool:
        """Return whether call `call` (0-based) may start. WaitTimedOut if `stop_after` does not follow a pause."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._paused or self._last is not None, self._timeout_s):
                what = "the coordinator to send the call to stop after"
                raise WaitTimedOut(what, self._timeout_s, "run.report_timeout_s")
            if self._last is not None and call >= self._last:
                return False
            self._started = call + 1
            return True

    @property
    def is_closed(self) -> bool:
        """Whether no call at all may start."""
        return self._last == 0

    def wait_to_load(self, seconds: float, heartbeat: Heartbeat) -> None:
        """Wait before samples are read again. CollectiveBroken if the gate is closed meanwhile."""
        with heartbeat.set_activity(RETRYING), self._condition:
            if self._condition.wait_for(lambda: self.is_closed, seconds):
                raise CollectiveBroken(heartbeat.instance, "the loading was aborted")

    @property
    def is_over(self) -> bool:
        """Whether the last call that may start has started."""
        with self._condition:
            return self._last is not None and self._started >= self._last

    def pause(self) -> int:
        """Start no more calls until `stop_after`; return the number of calls started so far."""
        with self._condition:
            self._paused = True
            return self._started

    def reopen(self) -> None:
        """Allow calls again, after the stopped segment has ended in all instances."""
        with self._condition:
            self._paused, self._last = False, None

    def stop_after(self, calls: int) -> None:
        """Start no call with a 0-based index of `calls` or more."""
        with self._condition:
            self._last = calls
            self._condition.notify_all()
