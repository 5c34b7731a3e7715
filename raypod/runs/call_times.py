"""Statistics of the durations of calls, per instance, and the slow instances that they show.

The first call of a process includes the compilation and is not counted. A call ends in all instances at the same time,
because every update is a collective; what distinguishes a slow instance is how long it was busy: the call without the
wait for the other instances.
"""

from __future__ import annotations

import bisect
import collections
import math
import statistics
import threading
import time
from typing import Any, Deque, Dict, Optional, Sequence, Set

from raypod.events import CallDone, CallTimes, Event, Repaired, RunEnded, RunStarted

# Upper bounds in seconds of the buckets of a histogram of calls.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STRAGGLER_RATIO = 1.25  # an instance that is busy for this multiple of the median is marked as slow
_RECENT_CALLS = 256
_EVENTS, _CALLS = 64, 8192  # that are counted at a time, at most: calls of all instances, and of one each
_FIRST_WINDOW_S, _WINDOW_SHARE = 10.0, 0.01  # of the time since the log was opened
_MAX_KEPT = 1024  # calls of a window
_MAX_KEPT_OF_ALL = 1 << 18  # calls of all instances together, about 25 MB; above 256 instances fewer are kept of each
_MIN_KEPT = 32


class RecentCalls:
    """The calls of one instance: totals of all, and the times of the most recent ones."""

    def __init__(self, kept: int = _RECENT_CALLS) -> None:
        self.calls = 0
        self.call_s = self.data_wait_s = self.peer_wait_s = self.slowest_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)  # the last one counts the calls above all bounds
        # Columns of the recent calls: sums of them are fast, and another thread can read them (each in one operation).
        self._call_s: Deque[float] = collections.deque(maxlen=kept)
        self._data_wait_s: Deque[float] = collections.deque(maxlen=kept)
        self._peer_wait_s: Deque[float] = collections.deque(maxlen=kept)  # NaN: unknown

    def add(self, times: CallTimes) -> None:
        """Count a call."""
        self.calls += 1
        call_s, peer_wait_s = times.call_s, times.peer_wait_s
        self.call_s += call_s
        self.data_wait_s += times.data_wait_s
        self.peer_wait_s += peer_wait_s or 0.0
        if call_s > self.slowest_s:
            self.slowest_s = call_s
        self.buckets[bisect.bisect_left(BUCKETS_S, call_s)] += 1
        self._call_s.append(call_s)
        self._data_wait_s.append(times.data_wait_s)
        self._peer_wait_s.append(math.nan if peer_wait_s is None else peer_wait_s)

    def summary(self) -> Dict[str, Optional[float]]:
        """Return seconds and shares over the recent calls; None for values that are unknown.

        Keys: `p50_s`, `p95_s`, `slowest_s` (of all calls), `mean_s`, `busy_s` (mean without the wait for the others),
        `data_wait_share`, `peer_wait_share` (of the calls' time, 0..1).
        """
        seconds = sorted(self._call_s)
        if not seconds:
            keys = ("p50_s", "p95_s", "slowest_s", "mean_s", "busy_s", "data_wait_share", "peer_wait_share")
            return dict.fromkeys(keys)
        total_s, data_s, peer_sum = sum(seconds), sum(self._data_wait_s), sum(self._peer_wait_s)
        peer_s = None if math.isnan(peer_sum) else peer_sum
        return {
            "p50_s": _quantile(seconds, 0.5),
            "p95_s": _quantile(seconds, 0.95),
            "slowest_s": self.slowest_s,
            "mean_s": total_s / len(seconds),
            "busy_s": (total_s - (peer_s or 0.0)) / len(seconds),
            "data_wait_share": data_s / total_s if total_s else 0.0,
            "peer_wait_share": None if peer_s is None else peer_s / total_s if total_s else 0.0,
        }


class CallsByInstance:
    """The calls of all instances of a run. Other threads may read what the coordinator's thread handles.

    `handle` collects events and counts them in batches: between two updates, the code and the data of the counting are
    in no cache of the processor, and counting takes ten times as long.
    """

    def __init__(self, kept: int = _RECENT_CALLS) -> None:
        self._kept = kept
        self._compiling: Set[int] = set()  # their next call is the first one of their process
        self._by_instance: Dict[int, RecentCalls] = {}
        self._collected: Deque[Event] = collections.deque()
        self._num_collected = 0  # calls in them
        self._lock = threading.RLock()  # a signal handler may end the window of a log during a count

    def handle(self, event: Event) -> None:
        """Count the calls of an event, if it has any."""
        if isinstance(event, CallDone):
            self._collected.append(event)
            self._num_collected += len(event.times)
            if len(self._collected) >= _EVENTS or self._num_collected >= _CALLS:
                self._count()
        elif isinstance(event, (RunStarted, Repaired)):
            self._collected.append(event)

    def forget(self) -> None:
        """Discard all calls; a process whose first call was discarded is not compiling again."""
        self._count()
        self._by_instance = {}

    def by_instance(self) -> Dict[int, RecentCalls]:
        """Return the calls of each instance that has any."""
        self._count()
        return dict(self._by_instance)

    def summaries(self) -> Dict[int, Dict[str, Optional[float]]]:
        """Return `RecentCalls.summary` of each instance, with `busy_ratio`: its busy time over the median of all."""
        found = {index: calls.summary() for index, calls in sorted(self.by_instance().items())}
        ratios = busy_ratios({index: each["busy_s"] for index, each in found.items()})
        return {index: {**each, "busy_ratio": ratios.get(index)} for index, each in found.items()}

    def _count(self) -> None:
        with self._lock:
            self._num_collected = 0
            while self._collected:
                event = self._collected.popleft()
                if isinstance(event, CallDone):
                    self._add(event.times)
                elif isinstance(event, RunStarted):
                    self._compiling = {each.instance for each in event.instances}
                    share = _MAX_KEPT_OF_ALL // max(1, len(event.instances))
                    self._kept = min(self._kept, max(_MIN_KEPT, share))
                elif isinstance(event, Repaired):
                    self._compiling.update(event.lost)

    def _add(self, calls: Sequence[CallTimes]) -> None:
        for times in calls:
            index = times.instance
            if index in self._compiling:
                self._compiling.discard(index)
            else:
                found = self._by_instance.get(index)
                if found is None:
                    found = self._by_instance[index] = RecentCalls(self._kept)
                found.add(times)


class CallTimesLog:
    """Condenses the calls of a run into one record per window, for `events.jsonl`.

    A window lasts 10 seconds, or 1 % of the time since the log was opened if that is longer, so that the number of
    records grows with the logarithm of the duration of the run.
    """

    def __init__(self) -> None:
        self._opened_s = time.monotonic()
        self._calls = CallsByInstance(_MAX_KEPT)
        self._first_update: Optional[int] = None
        self._num_calls = 0
        self._begin_window()

    def handle(self, event: Event) -> Optional[Dict[str, Any]]:
        """Count the calls of an event; return the record of a window that ends with it, else None."""
        self._calls.handle(event)
        if isinstance(event, CallDone):
            if self._first_update is None:
                self._first_update = event.first_update
            self._num_calls += 1
            return self.end_window() if time.monotonic() >= self._ends_s else None
        if isinstance(event, RunStarted):
            self._begin_window()
        return self.end_window() if isinstance(event, RunEnded) else None

    def end_window(self) -> Optional[Dict[str, Any]]:
        """Return the record of the calls since the last window, None without any, and begin the next window."""
        summaries = self._calls.summaries()
        record = {
            "first_update": self._first_update,
            "calls": self._num_calls,
            "window_s": time.monotonic() - self._began_s,
            "instances": [{"instance": index, **each} for index, each in summaries.items()],
        }
        self._calls.forget()
        self._first_update, self._num_calls = None, 0
        self._begin_window()
        return record if summaries else None

    def _begin_window(self) -> None:
        """Begin the next window; one of length w ends once w is 1 % of the time since the log was opened."""
        self._began_s = time.monotonic()
        share = _WINDOW_SHARE / (1 - _WINDOW_SHARE)
        self._ends_s = self._began_s + max(_FIRST_WINDOW_S, share * (self._began_s - self._opened_s))


def busy_ratios(busy_s: Dict[int, Optional[float]]) -> Dict[int, float]:
    """Return the ratio of each instance's busy time to the median of all; {} if there are fewer than two instances."""
    known = {index: value for index, value in busy_s.items() if value is not None}
    if len(known) < 2:
        return {}
    median = statistics.median(known.values())
    return {index: value / median for index, value in known.items()} if median > 0 else {}


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
