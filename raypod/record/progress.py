"""Console output of a run: the plan, a progress bar and a line per epoch, failures, and the result.

The bar uses tqdm, on the driver only. If stderr is neither a terminal nor that of a notebook, plain lines replace it.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, Optional, TextIO, Union

from tqdm.auto import tqdm

from raypod.events import (
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    Event,
    InstanceLost,
    Repaired,
    RunEnded,
    RunStarted,
    StoppedEarly,
    UpdateDone,
)
from raypod.plan.plan import Plan
from raypod.plan.tables import render

_LINE_INTERVAL_S = 10.0  # between lines inside an epoch, if stderr is not a terminal


class Progress:
    """Shows the events of a run: the bar on stderr, all lines on stdout."""

    def __init__(self, plan: Plan, out: Optional[TextIO] = None, err: Optional[TextIO] = None) -> None:
        self._plan, self._out, self._err = plan, out or sys.stdout, err or sys.stderr
        self._bar: Optional[Any] = None
        self._has_bar = self._err.isatty() or type(self._err).__module__.startswith("ipykernel.")
        self._last_line_s = time.monotonic()
        self._warned_nonfinite = False

    def begin(self) -> None:
        """Print the plan, before anything is started."""
        self.print_line(render(self._plan))
        self.print_line("")

    def show(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, UpdateDone):
            self._show_update(event)
            return
        line = self._line_of(event)
        if line is not None:
            self._close_bar()
            self.print_line(line)

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.print_line(f"warning: {text}")

    def print_line(self, text: str) -> None:
        """Print a line to stdout."""
        self._last_line_s = time.monotonic()
        self._out.write(text + "\n")
        self._out.flush()

    def close(self) -> None:
        """Close the progress bar."""
        self._close_bar()

    def _line_of(self, event: Event) -> Optional[str]:
        """Return the line of an event; None for an event that is not shown."""
        if isinstance(event, RunStarted):
            resumed = f", from update {event.first_update} on" if event.first_update else ""
            return f"{event.device_line}; {event.parameters:,} parameters, the same in all instances{resumed}"
        if isinstance(event, EpochDone):
            shown = ", ".join(metric.shown(event.metrics[metric.name]) for metric in self._plan.task.metrics)
            return f"[Epoch {event.epoch:02d}] {shown}"
        if isinstance(event, EvaluationDone):
            return self._evaluation_line(event)
        if isinstance(event, (CheckpointFailed, InstanceLost, Repaired)):
            return _failure_line(event)
        if isinstance(event, StoppedEarly):
            return f"Stopped early after update {event.update}: {event.reason}"
        if isinstance(event, RunEnded) and event.interrupted:
            cause = f" ({event.cause})" if event.cause else ""
            how = "Preempted" if event.preempted else "Interrupted"
            return f"{how} after update {event.updates}; continue with --resume {self._plan.run_dir}{cause}"
        return None

    def _evaluation_line(self, event: EvaluationDone) -> str:
        task, best = self._plan.task, self._plan.best_metric
        if event.update < self._plan.total_updates:
            shown = ", ".join(f"test {metric.shown(event.metrics[metric.name], 1)}" for metric in task.metrics)
            return f"[Epoch {event.epoch:02d}] {shown}"
        others = [metric for metric in task.metrics if metric is not best]
        shown = ", ".join(f"{metric.name} {metric.text(event.metrics[metric.name])}" for metric in others)
        value = best.text(event.metrics[best.name])
        return f"Test {best.name}: {value} of {event.samples} {task.samples_are}{f' ({shown})' if shown else ''}"

    def _figures(self, event: UpdateDone) -> str:
        task = self._plan.task
        results = ", ".join(metric.shown(event.metrics[metric.name], 0, "=") for metric in task.metrics)
        if not event.has_results:
            results = f"{' and '.join(metric.label or metric.name for metric in task.metrics)} unknown"
        rates = {f"{task.samples_are}_per_s": event.samples_per_s} if task.parts is None else event.part_rates
        return ", ".join([results, *(f"{rate:.0f} {name.replace('_per_s', '/s')}" for name, rate in rates.items())])

    def _show_update(self, event: UpdateDone) -> None:
        if not self._warned_nonfinite and event.has_results and not math.isfinite(event.loss):
            self._warned_nonfinite = True
            self._close_bar()
            stops = self._plan.config.run.on_nonfinite == "stop"
            consequence = "the run stops" if stops else "the run continues (--on-nonfinite continue)"
            self.warn(f"the loss became {event.loss} at update {event.update}; {consequence}")
        if not self._has_bar:
            if time.monotonic() - self._last_line_s > _LINE_INTERVAL_S:
                self.print_line(f"update {event.update}/{self._plan.total_updates}: {self._figures(event)}")
            return
        if self._bar is None:
            done = (event.update - 1) % self._plan.updates_per_epoch
            left = self._plan.total_updates - (event.update - 1 - done)
            total = min(self._plan.updates_per_epoch, left)
            label = f"[Epoch {event.epoch:02d}]"
            self._bar = tqdm(desc=label, total=total, initial=done, file=self._err, unit="update", dynamic_ncols=True)
        self._bar.set_postfix_str(self._figures(event), refresh=False)
        self._bar.update(1)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _failure_line(event: Union[CheckpointFailed, InstanceLost, Repaired]) -> str:
    if isinstance(event, CheckpointFailed):
        previous = Path(event.previous).name
        return f"warning: cannot write the checkpoint {event.path}: {event.cause}; the previous one is {previous}"
    if isinstance(event, InstanceLost):
        activity = f"; it was {event.activity}" if event.activity and event.activity not in event.cause else ""
        cause = f"{event.cause}{activity}; its log: {event.log_file}"
        return f"Instance {event.instance} on host {event.host} is lost: {cause}"
    new = ", ".join(f"instance {index} on {host}" for index, host in zip(event.lost, event.hosts))
    damaged = "".join(f"warning: {each}\n" for each in event.passed_over)
    return damaged + (
        f"Repaired in {event.seconds:.1f} s: {f'new {new}' if new else 'process group re-formed'}, with the state of "
        f"{event.seeded_from}; continuing after update {event.update} (restart {event.restarts})"
    )
