"""Which calls of an instance are profiled, and what it has recorded."""

from __future__ import annotations

import os
from typing import Optional

from raypod.events import ProcessSpans
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Plan
from raypod.plan.profile_window import window_of
from raypod.system.emulated import telemetry
from raypod.system.spans import recorder


class Profile:
    """Turns the recorder of this process on for the calls of the window.

    It is also on before the first segment, so that the profile shows the start of the instance, and after the last
    update of the run if the window contains that.
    """

    def __init__(self, plan: Plan, spec: InstanceSpec) -> None:
        self._spec, self._window = spec, window_of(plan)
        self._is_last = self._window is not None and self._window.stop == plan.total_updates
        self._was_on = False
        recorder.reset(is_on=self._window is not None)
        if self._window is not None:
            telemetry.listen(recorder)

    def begin_call(self, update: int) -> None:
        """Turn the recorder on or off for what follows: the call that begins at `update` (0-based)."""
        if self._window is not None:
            recorder.is_on = self._was_on = update in self._window or (self._is_last and update >= self._window.stop)

    def end_call(self, next_update: int) -> Optional[ProcessSpans]:
        """Return the spans of a call in the window, and `begin_call` the next one."""
        if self._window is None:
            return None
        was_on = self._was_on
        self.begin_call(next_update)
        return self.take(with_open=not self._was_on) if was_on else None

    def take(self, with_open: bool = True) -> ProcessSpans:
        """Return the spans since the previous time."""
        spans, dropped = recorder.take(with_open)
        return ProcessSpans(self._spec.index, self._spec.host, os.getpid(), spans, dropped)

    def close(self) -> None:
        """Turn the recorder off, and forget what it holds."""
        recorder.reset(is_on=False)
