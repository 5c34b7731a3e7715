"""Where a leg ends that is stopped from outside: after the same call in every instance."""

from __future__ import annotations

import threading
from typing import Optional

from raypod.errors import WaitTimedOut


class StopGate:
    """Lets an outside thread end the leg after the same call in every instance.

    Instances run in step (each update waits for all), but a stop request reaches them at different moments. So each
    first says how far it is and starts nothing more; then all are told the largest of these numbers.
    """

    def __init__(self, timeout_s: float) -> None:
        self._condition = threading.Condition()
        self._timeout_s = timeout_s
        self._paused = False
        self._last: Optional[int] = None
        self._started = 0

    def enter(self, call: int) -> bool:
        """Before call `call` (0-based): whether it may start. WaitTimedOut if nobody says where to stop."""
        with self._condition:
            if self._paused and self._last is None:
                told = self._condition.wait_for(lambda: self._last is not None, timeout=self._timeout_s)
                if not told:
                    raise WaitTimedOut("the coordinator to say where to stop", self._timeout_s, "run.report_timeout_s")
            if self._last is not None and call >= self._last:
                return False
            self._started = call + 1
            return True

    def pause(self) -> int:
        """Start no further call until `stop_after` is told; the number of calls started so far."""
        with self._condition:
            self._paused = True
            return self._started

    def reopen(self) -> None:
        """After the leg that was stopped has ended everywhere: the next one may start its calls."""
        with self._condition:
            self._paused, self._last = False, None

    def stop_after(self, calls: int) -> None:
        """Start no call from `calls` (0-based) on."""
        with self._condition:
            self._last = calls
            self._condition.notify_all()
