"""Write a checkpoint while no training goes on, and wait for a disk that is full or lost, for a limited time."""

from __future__ import annotations

import dataclasses
import time
from typing import Iterator, Optional

from raypod.coordinator.checkpoint_schedule import CheckpointSchedule
from raypod.coordinator.stop import Stop
from raypod.events import CheckpointFailed, Event, PhaseBegun
from raypod.fleet.base import Fleet

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # before the next attempt
_POLL_S = 0.2  # for a signal


class DiskWait:
    """The attempts to write one checkpoint. A requested stop ends the run without a further attempt."""

    def __init__(self, schedule: CheckpointSchedule, stop: Stop, limit_s: float) -> None:
        """`limit_s` is the time from the first failure to the end of the run."""
        self._schedule, self._stop, self._limit_s = schedule, stop, limit_s
        self._deadline_s: Optional[float] = None
        self._pause_s = _FIRST_PAUSE_S

    def save(self, fleet: Fleet, update: int) -> Iterator[Event]:
        """Write the state after `update` updates, unless that is begun, and wait until it is written.

        Raises:
            CheckpointNotSaved: it cannot be written within the time, or its error is not one of the disk.
        """
        yield PhaseBegun("saving", update)
        while True:
            yield from self._schedule.begin(fleet, update)
            for event in self._schedule.finish(fleet):
                if not isinstance(event, CheckpointFailed) or event.update != update:
                    yield event
                elif self._deadline_s is None and not self._stop.requested:
                    yield dataclasses.replace(event, waits_s=self._limit_s)
            if self._schedule.failed is None:
                return
            self._wait()

    def _wait(self) -> None:
        """Wait before the next attempt, each time longer. CheckpointNotSaved if the time is over."""
        now_s = time.monotonic()
        if self._deadline_s is None:
            self._deadline_s = now_s + self._limit_s
        if self._stop.requested or now_s >= self._deadline_s:
            raise self._schedule.not_saved(now_s - self._deadline_s + self._limit_s)
        ends_s = min(now_s + self._pause_s, self._deadline_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        while time.monotonic() < ends_s and not self._stop.requested:
            time.sleep(min(_POLL_S, max(0.0, ends_s - time.monotonic())))
