"""What a person sees while a run runs: the plan, one bar per epoch, one line per epoch, the result.

tqdm on the driver only; where the output is no terminal, plain lines without carriage returns.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, Optional, TextIO, Union

from tqdm import tqdm

from raypod.events import (
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    Event,
    InstanceLost,
    Repaired,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from raypod.plan.plan import Plan
from raypod.plan.tables import render

_LINE_EVERY_S = 10.0  # without a terminal: a sign of life inside a long epoch


class Progress:
    """Shows events; `stream` is stderr for the bar and stdout for the lines that stay."""

    def __init__(self, plan: Plan, out: Optional[TextIO] = None, err: Optional[TextIO] = None) -> None:
        self._plan, self._out, self._err = plan, out or sys.stdout, err or sys.stderr
        self._bar: Optional[Any] = None
        self._is_terminal = self._err.isatty()
        self._said_s = time.monotonic()
        self._is_finite = True

    def begin(self) -> None:
        """Before anything is started: which pod, what will run where."""
        self.say(render(self._plan))
        self.say("")

    def show(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, RunStarted):
            self._started(event)
        elif isinstance(event, UpdateDone):
            self._updated(event)
        elif isinstance(event, EpochDone):
            self._close_bar()
            self.say(f"[Epoch {event.epoch:02d}] loss: {event.loss:.3f}, acc: {event.accuracy:.1f}")
        elif isinstance(event, EvaluationDone) and event.update < self._plan.total_updates:
            self._close_bar()
            self.say(f"[Epoch {event.epoch:02d}] test loss: {event.loss:.3f}, test acc: {event.accuracy:.2f}")
        elif isinstance(event, CheckpointFailed):
            self._close_bar()
            previous = Path(event.previous).name
            self.warn(f"cannot write the checkpoint {event.path}: {event.cause}; {previous} is still there")
        elif isinstance(event, EvaluationDone):
            self._close_bar()
            self.say(f"Test accuracy: {event.accuracy:.2f} % of {event.samples} images (loss {event.loss:.3f})")
        elif isinstance(event, (InstanceLost, Repaired)):
            self._close_bar()
            self.say(_of_a_failure(event))
        elif isinstance(event, RunEnded):
            self._close_bar()
            if event.interrupted:
                cause = f" ({event.cause})" if event.cause else ""
                self.say(f"Interrupted after update {event.updates}; go on with --resume {self._plan.run_dir}{cause}")

    def warn(self, text: str) -> None:
        """A line that is no error."""
        self.say(f"warning: {text}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self._said_s = time.monotonic()
        self._out.write(text + "\n")
        self._out.flush()

    def close(self) -> None:
        """Leave the terminal in order, whatever happened."""
        self._close_bar()

    def _started(self, event: RunStarted) -> None:
        again = f", from update {event.first_update} on" if event.first_update else ""
        self.say(f"{event.device_line}; {event.parameters:,} parameters, the same in all instances{again}")

    def _updated(self, event: UpdateDone) -> None:
        if self._is_finite and not math.isfinite(event.loss):
            self._is_finite = False  # said once
            self._close_bar()
            self.warn(f"the loss turned {event.loss} at update {event.update}; --on-nonfinite stop ends a run there")
        if not self._is_terminal:
            if time.monotonic() - self._said_s > _LINE_EVERY_S:
                self.say(f"update {event.update}/{self._plan.total_updates}: {_figures(event)}")
            return
        if self._bar is None:
            done = (event.update - 1) % self._plan.updates_per_epoch
            left = self._plan.total_updates - (event.update - 1 - done)
            total = min(self._plan.updates_per_epoch, left)
            label = f"[Epoch {event.epoch:02d}]"
            self._bar = tqdm(desc=label, total=total, initial=done, file=self._err, unit="update", dynamic_ncols=True)
        self._bar.set_postfix_str(_figures(event), refresh=False)
        self._bar.update(1)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _figures(event: UpdateDone) -> str:
    return f"loss={event.loss:.3f}, acc={event.accuracy:.1f}, {event.samples_per_s:.0f} images/s"


def _of_a_failure(event: Union[InstanceLost, Repaired]) -> str:
    if isinstance(event, InstanceLost):
        where = f"; it was {event.doing}" if event.doing and event.doing not in event.cause else ""
        return (
            f"Instance {event.instance} on host {event.host} is lost: {event.cause}{where}; its log: {event.log_file}"
        )
    new = ", ".join(f"instance {index} on {host}" for index, host in zip(event.lost, event.hosts))
    damaged = "".join(f"warning: {each}\n" for each in event.passed_over)
    return damaged + (
        f"Repaired in {event.seconds:.1f} s: {f'new {new}' if new else 'all have met anew'}, with the state of "
        f"{event.seeded_from}; going on after update {event.update} (restart {event.restarts})"
    )
