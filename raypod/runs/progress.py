"""Console output of a run: the plan, a progress bar with the remaining time, failures, and the table at the end.

The bar uses tqdm, on the driver only. If stderr is neither a terminal nor that of a notebook, plain lines replace it.
"""

from __future__ import annotations

import math
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, TextIO, Tuple, Union

from tqdm.auto import tqdm

from raypod.events import (
    CheckpointFailed,
    EpochDone,
    EvaluationDone,
    Event,
    InstanceLost,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    StoppedEarly,
    UpdateDone,
)
from raypod.plan.layout import REPORT, SUMMARY
from raypod.plan.plan import Plan
from raypod.plan.tables import aligned, render, render_brief, shown_path
from raypod.runs.callback import Reporter
from raypod.runs.run_folder import way_to_continue
from raypod.system.command_line import DEFAULT_WIDTH, counted, paint, tell, width_of
from raypod.system.files import parse_json
from raypod.system.process import versions

QUIET, NORMAL, VERBOSE = -1, 0, 1
_LINE_INTERVAL_S = 10.0  # between lines inside an epoch, if stderr is not a terminal
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_NO_BAR = "{desc} {n_fmt}/{total_fmt}{postfix}"
_LEAST_BAR = 12  # columns that the percentage and a short bar need


class Progress(Reporter):
    """Shows the events of a run: the bar on stderr, all lines on stdout."""

    def __init__(
        self,
        plan: Plan,
        out: Optional[TextIO] = None,
        err: Optional[TextIO] = None,
        detail: int = NORMAL,
    ) -> None:
        """`detail` is QUIET: warnings and the result; NORMAL; or VERBOSE: also the whole plan and the versions."""
        self._plan, self._out, self._err, self._detail = plan, out or sys.stdout, err or sys.stderr, detail
        self._bar: Optional[Any] = None
        self._is_notebook = type(self._err).__module__.startswith("ipykernel.")
        self._has_bar = (self._err.isatty() or self._is_notebook) and detail > QUIET
        self._remaining = RemainingTime(plan.total_updates, plan.geometry.device_iterations)
        self._last_line_s = time.monotonic()
        self._unfinished: Optional[UpdateDone] = None  # the newest update of an epoch that has not ended

    def __enter__(self) -> Progress:
        """Print the plan, before anything is started."""
        render_plan = render if self._detail == VERBOSE else render_brief
        self.print_line(render_plan(self._plan, width_of(self._out)))
        if self._detail == VERBOSE:
            self.print_line(f"\n{'versions':>12}  {', '.join(' '.join(each) for each in versions())}")
        self.print_line("")
        return self

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        self._remaining.add(event)
        if isinstance(event, UpdateDone):
            self._unfinished = event
            self._show_update(event)
            return
        if isinstance(event, EpochDone):
            self._unfinished = None
        elif isinstance(event, RunEnded) or self._is_final(event):
            self._show_unfinished_epoch()
        line = self._line_of(event)
        if line is None or (self._detail == QUIET and not self._is_important(event)):
            return
        self._close_bar()
        line, style = self._folded(line), self._style_of(event)
        self._write(paint(line, style, self._out) if style else line)

    def warn(self, text: str) -> None:
        """Print a warning, also a quiet run."""
        self._close_bar()
        self._write(self._folded(f"warning: {text}").replace("warning:", paint("warning:", "yellow", self._out), 1))

    def print_line(self, text: str) -> None:
        """Print a line to stdout, unless the run is quiet."""
        if self._detail > QUIET:
            self._write(self._folded(text))

    def _folded(self, text: str) -> str:
        """Return lines that fit into the terminal of stdout, if it is one. Words, as paths, are kept whole."""
        width = width_of(self._out)
        if width is None:
            return text
        wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(line if len(line) <= wrapper.width else wrapper.fill(line) for line in text.split("\n"))

    def _write(self, text: str) -> None:
        self._last_line_s = time.monotonic()
        tell(text, self._out)

    def _is_important(self, event: Event) -> bool:
        """Return whether a quiet run shows an event: what went wrong, and the result."""
        return self._is_final(event) or isinstance(event, (CheckpointFailed, InstanceLost, Repaired, Resized, RunEnded))

    def _is_final(self, event: Event) -> bool:
        """Return whether an event is the evaluation after the last update."""
        return isinstance(event, EvaluationDone) and event.update >= self._plan.total_updates

    def _style_of(self, event: Event) -> Optional[str]:
        if self._is_final(event):
            return "bold"
        styles = {InstanceLost: "red", CheckpointFailed: "yellow", Repaired: "green", Resized: "yellow"}
        return styles.get(type(event))

    def __exit__(self, *_: object) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def _line_of(self, event: Event) -> Optional[str]:
        """Return the line of an event; None for an event that is not shown."""
        if isinstance(event, RunStarted):
            resumed = f", from update {event.first_update} on" if event.first_update else ""
            return f"{event.device_line}; {event.parameters:,} parameters in each instance{resumed}"
        if isinstance(event, EpochDone):
            shown = ", ".join(metric.shown(event.metrics[metric.name]) for metric in self._plan.task.metrics)
            return f"[Epoch {event.epoch:02d}] {shown}"
        if isinstance(event, EvaluationDone):
            return self._evaluation_line(event)
        if isinstance(event, (CheckpointFailed, InstanceLost, Repaired)):
            return _failure_line(event)
        if isinstance(event, Resized):
            return _resized_line(event)
        if isinstance(event, StoppedEarly):
            return f"Stopped early after update {event.update}: {event.reason}"
        if isinstance(event, RunEnded) and event.interrupted:
            cause = f" ({event.cause})" if event.cause else ""
            hint = way_to_continue(self._plan.run_dir, event.updates, event.checkpoint)
            how = "Preempted" if event.preempted else "Interrupted"
            return f"{how} after update {event.updates}; {hint}{cause}"
        return None

    def _evaluation_line(self, event: EvaluationDone) -> str:
        task, best = self._plan.task, self._plan.best_metric
        if event.update < self._plan.total_updates:
            found = [metric for metric in task.evaluated_metrics if metric.name in event.metrics]
            shown = ", ".join(f"test {metric.shown(event.metrics[metric.name], 1)}" for metric in found)
            return f"[Epoch {event.epoch:02d}] {shown}"
        others = [each for each in task.evaluated_metrics if each is not best and each.name in event.metrics]
        shown = ", ".join(f"{metric.name} {metric.text(event.metrics[metric.name])}" for metric in others)
        value = best.text(event.metrics[best.name])
        return f"Test {best.name}: {value} of {event.samples} {task.samples_are}{f' ({shown})' if shown else ''}"

    def _figures(self, event: UpdateDone) -> List[str]:
        """Return the metrics of an update and its rates, each as a text."""
        task = self._plan.task
        results = [metric.shown(event.metrics[metric.name], 0, "=") for metric in task.metrics]
        if not event.has_results:
            results = [f"{' and '.join(metric.label or metric.name for metric in task.metrics)} unknown"]
        rates = {f"{task.samples_are}_per_s": event.samples_per_s} if task.parts is None else event.part_rates
        known = [] if event.learning_rate is None else [f"lr={event.learning_rate:.3g}"]
        return [*results, *known, *(f"{rate:.0f} {name.replace('_per_s', '/s')}" for name, rate in rates.items())]

    def _fitting(self, event: UpdateDone, room: int) -> str:
        """Return the remaining time and the figures; metrics after the first are left out until they fit."""
        left_s, figures = self._remaining.left_s, self._figures(event)
        parts = [*([] if left_s is None else [f"{tqdm.format_interval(left_s)} left"]), *figures]
        first = len(parts) - len(figures) + 1
        while len(parts) > first + 1 and len(", ".join(parts)) > room:
            del parts[first]
        return ", ".join(parts)

    def _show_update(self, event: UpdateDone) -> None:
        if not self._has_bar:
            if time.monotonic() - self._last_line_s > _LINE_INTERVAL_S:
                figures = self._fitting(event, sys.maxsize)
                self.print_line(f"update {event.update}/{self._plan.total_updates}: {figures}")
            return
        is_new = self._bar is None
        if self._bar is None:
            done = (event.update - 1) % self._plan.updates_per_epoch
            left = self._plan.total_updates - (event.update - 1 - done)
            total = min(self._plan.updates_per_epoch, left)
            if self._is_notebook:  # a bar is a widget there: one for the whole run
                done, total = event.update - 1, self._plan.total_updates
            label = f"[Epoch {event.epoch:02d}]"
            # The delay: no bar without figures, which an interruption would leave in the terminal.
            self._bar = tqdm(desc=label, total=total, initial=done, file=self._err, leave=False, delay=1e-9)
        columns = width_of(self._err) or DEFAULT_WIDTH
        counts = len(f"[Epoch {event.epoch:02d}] {self._bar.total}/{self._bar.total}, ")
        figures = self._fitting(event, columns - counts - 1)
        self._bar.bar_format = _BAR if columns > counts + len(figures) + _LEAST_BAR else _NO_BAR
        self._bar.ncols = columns
        self._bar.set_postfix_str(figures, refresh=False)
        if self._is_notebook:
            self._bar.set_description_str(f"[Epoch {event.epoch:02d}]", refresh=False)
            self._bar.update(event.update - self._bar.n)  # less than 0 after a rollback
        else:
            self._bar.update(1)
        if is_new:
            self._bar.refresh()

    def _show_unfinished_epoch(self) -> None:
        """Print the metrics of the last update of a run that ends within an epoch, which has no line of its own."""
        last, self._unfinished = self._unfinished, None
        if last is None or not last.has_results:
            return
        shown = ", ".join(metric.shown(last.metrics[metric.name]) for metric in self._plan.task.metrics)
        self._close_bar()
        self.print_line(f"[Epoch {last.epoch:02d}, update {last.update}] {shown}")

    def _close_bar(self) -> None:
        """Remove the bar, so that a line can be printed; in a notebook the bar stays until the run ends."""
        if not self._is_notebook:
            self.__exit__()


def _resized_line(event: Resized) -> str:
    return (
        f"Elastic: {counted(event.replicas, 'replica')} x accumulation {event.gradient_accumulation} from update "
        f"{event.update + 1} on, instead of {counted(event.replicas_before, 'replica')} "
        f"({event.cause}): every update has the same samples, but sums them in another order, so the bits of the "
        "weights differ"
    )


def _failure_line(event: Union[CheckpointFailed, InstanceLost, Repaired]) -> str:
    if isinstance(event, CheckpointFailed):
        previous = f"the previous one is {Path(event.previous).name}" if event.previous else "there is no previous one"
        waits = f"; the training stops, and waits for the disk ({event.waits_s:g} s at most)" if event.waits_s else ""
        return f"warning: cannot write the checkpoint {event.path}: {event.cause}; {previous}{waits}"
    if isinstance(event, InstanceLost):
        is_news = event.activity and event.activity not in event.cause
        activity = f"; at its last heartbeat it was {event.activity}" if is_news else ""
        cause = f"{event.cause}{activity}; its log: {event.log_file}"
        return f"Instance {event.instance} on host {event.host} is lost: {cause}"
    new = ", ".join(f"instance {index} on {host}" for index, host in zip(event.lost, event.hosts))
    damaged = "".join(f"warning: {each}\n" for each in event.passed_over)
    reset = f"devices reset on {', '.join(event.reset_on)}, " if event.reset_on else ""
    return damaged + (
        f"Repaired in {event.seconds:.1f} s: {reset}{f'new {new}' if new else 'process group re-formed'}, "
        f"with the state of {event.seeded_from}; continuing after update {event.update} (restart {event.restarts})"
    )


def summary_table(plan: Plan, seconds: float, width: Optional[int] = None) -> str:
    """Return the table of a run that has ended; `seconds` is its time so far, `width` that of a terminal."""
    folder = Path(plan.run_dir)
    summary = parse_json((folder / SUMMARY).read_text())
    rows: List[Tuple[str, str]] = []
    best = plan.best_metric
    value = summary.get(f"test_{best.name}")
    if value is not None:
        rows.append((best.name.replace("_", " "), best.text(value)))
    first_s = summary["seconds_to_first_update"]
    started = "" if first_s is None else f", {_duration(first_s)} of them until the first update"
    rows.append(("time", f"{_duration(seconds)}{started}"))
    rows.append(("throughput", _throughput(plan, summary)))
    rows.append(("restarts", str(summary["restarts"])))
    if summary["checkpoint"]:
        rows.append(("checkpoint", shown_path(str(folder / summary["checkpoint"]))))
    if (folder / REPORT).is_file():
        rows.append(("report", shown_path(str(folder / REPORT))))
    rows.append(("run folder", shown_path(plan.run_dir)))
    return "\n".join(aligned(rows, width))


def _throughput(plan: Plan, summary: Dict[str, Any]) -> str:
    if not summary["samples_per_s"]:
        return "not known: the first call is not timed"
    rates = plan.task.part_rates(summary["samples_per_s"])
    names = rates or {f"{plan.task.samples_are}_per_s": summary["samples_per_s"]}
    shown = ", ".join(f"{rate:.0f} {name.replace('_per_s', '/s')}" for name, rate in names.items())
    return f"{shown}; {100 * summary['data_wait_share']:.1f} % of the calls' time waiting for data"


def _duration(seconds: float) -> str:
    """Return a duration, as in 7.6 s, 2 min 5 s, or 1 h 2 min."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_PACE_S = 60.0  # the time of training from which the pace is estimated, at least `_PACE_CALLS` calls
_PACE_CALLS = 10
_SMOOTH_S = 30.0  # after which the shown end of the run follows the estimated one
_SMOOTH_SHARE = 0.25  # of the remaining time, if that is shorter
_LARGEST_STEP = 0.5  # of one call, as a share of the difference


class RemainingTime:
    """Estimates when a run ends: from the pace of its recent calls, and the share of its evaluations.

    A repair is an exception, which moves the end by its duration and does not change the pace. The end moves gradually,
    so that one slow call or the first evaluation does not multiply the remaining time.
    """

    def __init__(self, total_updates: int, updates_per_call: int = 1) -> None:
        self._total, self._per_call = total_updates, updates_per_call
        self._last: Optional[UpdateDone] = None  # of the newest call; the duration of the first is not counted
        self._train_s, self._trained = 0.0, 0.0  # of recent calls, with weights that decay
        self._evaluate_s, self._evaluated = 0.0, 0  # of the evaluations, and the updates until the newest of them
        self._since_evaluation = 0
        self._has_evaluated, self._has_failed = False, False  # since the newest call
        self._estimates = 0
        self._now_s, self._end_s = 0.0, math.nan

    @property
    def left_s(self) -> Optional[float]:
        """The time from the newest update to the end of the run, in seconds; None if it is not known yet."""
        return max(0.0, self._end_s - self._now_s) if math.isfinite(self._end_s) else None

    def add(self, event: Event) -> None:
        """Take an event of the run into account."""
        if isinstance(event, EvaluationDone):
            self._has_evaluated = True
        elif isinstance(event, (InstanceLost, Repaired, Resized)):
            self._has_failed = True
        elif isinstance(event, UpdateDone):
            self._now_s = event.time_s
            if event.update % self._per_call == 0 or event.update >= self._total:
                self._add_call(event)

    def _add_call(self, event: UpdateDone) -> None:
        last, self._last = self._last, event
        if last is None or event.update <= last.update:
            return
        updates, elapsed_s = event.update - last.update, event.time_s - last.time_s
        if self._has_evaluated or self._has_failed:
            self._add_pause(max(0.0, elapsed_s - updates * self._pace_s))
        else:
            kept = 0.5 ** (elapsed_s / max(_PACE_S, _PACE_CALLS * elapsed_s))
            self._train_s, self._trained = kept * self._train_s + elapsed_s, kept * self._trained + updates
        self._has_evaluated = self._has_failed = False
        self._since_evaluation += updates
        if self._trained:
            self._move_end(event.time_s, elapsed_s, self._total - event.update)

    def _add_pause(self, seconds: float) -> None:
        if self._has_failed:
            self._end_s += seconds
        else:
            self._evaluate_s += seconds
            self._evaluated += self._since_evaluation
            self._since_evaluation = 0

    def _move_end(self, now_s: float, elapsed_s: float, updates: int) -> None:
        evaluation_s = self._evaluate_s / self._evaluated if self._evaluated else 0.0
        left_s = (self._pace_s + evaluation_s) * updates
        self._estimates += 1
        within_s = min(_SMOOTH_S, _SMOOTH_SHARE * left_s)
        share = min(_LARGEST_STEP, 1.0 - math.exp(-elapsed_s / within_s)) if within_s > 0 else 1.0
        share = max(share, 1.0 / self._estimates)
        before_s = self._end_s if self._estimates > 1 else 0.0
        self._end_s = before_s + share * (now_s + left_s - before_s)

    @property
    def _pace_s(self) -> float:
        return self._train_s / self._trained if self._trained else 0.0
