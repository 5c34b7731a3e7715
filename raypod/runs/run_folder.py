"""The run folder: its path, what is written before the run, the summary after it, and from which checkpoint it began.

The event `run_started` has the record, so that it lasts as long as what the run has done since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Type

from raypod.errors import ConfigError, RunError
from raypod.events import EvaluationDone, Event, UpdateDone
from raypod.plan import layout, stored_code
from raypod.plan.config import Config
from raypod.plan.layout import CONFIG, EVALUATIONS, EVENTS, LOGS, METRICS, PLAN, SEAL, SUMMARY
from raypod.plan.plan import Plan, default_run_dir
from raypod.plan.resolve import run_folder_of
from raypod.plan.tables import describe, topology_summary
from raypod.runs import event_log, run_state
from raypod.runs.callback import Callback
from raypod.runs.growing_file import last_lines, parse_records
from raypod.runs.lease import is_lease
from raypod.runs.metrics import Measured, MetricsAggregator, events_in, flat
from raypod.runs.run_state import RunState
from raypod.runs.run_view import RunView
from raypod.system.files import replace_file, strict_json
from raypod.system.log_files import LogTimes
from raypod.system.urls import is_url, run_url
from raypod.training.checkpoint import resume, storage


def choose(resolved: Config) -> str:
    """Return the folder of a run: `--run-dir`, the folder of the resumed run, or a new one under `runs/`.

    A run that resumes from a URL has a folder under `runs/` with the name of the remote run.
    """
    if resolved.run.resume and is_url(resolved.run.resume):
        name = run_url(resolved.run.resume).name
        return os.path.abspath(resolved.run.run_dir or f"runs/{name}")  # noqa: PTH100 - keeps symlinks
    resumed = run_folder_of(resolved.run.resume) if resolved.run.resume else None
    if resumed and not resolved.run.run_dir and resumed.is_dir():
        return str(resumed)
    return os.path.abspath(default_run_dir(resolved, time.strftime("%Y%m%d-%H%M%S")))  # noqa: PTH100 - keeps symlinks


def is_named(config: Config, run_dir: str) -> bool:
    """Return whether the config names the folder that `choose` returned, so that it may exist."""
    resume = config.run.resume
    if config.run.run_dir or resume is None:
        return bool(config.run.run_dir)
    return is_url(resume) or run_folder_of(resume) == Path(run_dir).resolve()


def check_is_run_folder(folder: Path, config: Config) -> None:
    """Raise ConfigError unless an existing folder is empty, a run folder, or the one from which the run resumes."""
    if not folder.is_dir():
        raise ConfigError(f"--run-dir {folder} is not a folder; choose another one")
    names = sorted(path.name for path in folder.iterdir())
    if layout.is_run_folder(folder) or any(map(is_lease, names)) or _is_hardly_begun(folder, names):
        return
    if config.run.resume and run_folder_of(config.run.resume) == folder.resolve():
        return
    raise ConfigError(
        f"--run-dir {folder} is not empty and no run folder (it contains {names[0]}); choose another folder"
    )


def _is_hardly_begun(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a folder is empty, or has at most what a run that was killed writes before `plan.json`."""
    logs = folder / LOGS
    found = {path.stem for path in logs.iterdir()} if logs.is_dir() else set()
    return set(names) <= {LOGS, f"{PLAN}.partial"} and found <= {log_of(folder).stem}


def check_may_write(plan: Plan) -> None:
    """Raise ConfigError if the folder holds another run than the resumed one, a finished run, or other files.

    A run that began from the resumed one, and was cut off, is not another one.
    """
    folder = Path(plan.run_dir)
    resume = plan.config.run.resume
    if not is_named(plan.config, plan.run_dir) or not folder.exists():
        return
    check_is_run_folder(folder, plan.config)
    if resume:
        may_write = run_folder_of(resume) == folder.resolve() or is_begun(plan)
    else:
        may_write = run_state.is_unfinished(folder)
    has_checkpoint = bool(storage.list_checkpoints(storage.checkpoints_folder(folder))[0])
    has_updates = (folder / METRICS).exists() and (has_checkpoint or (folder / METRICS).stat().st_size > 0)
    if has_updates and not may_write:
        hint = f"continue with --resume {folder}" if has_checkpoint else "remove it: it has no checkpoint"
        raise ConfigError(f"--run-dir {folder} holds a run already; choose another folder, or {hint}")


def way_to_continue(run_dir: str, updates: int, checkpoint: Optional[str], option: str = "--resume ") -> str:
    """Return how an interrupted run continues, for a message.

    Args:
        updates, checkpoint: of `RunEnded`. The checkpoint can be in the folder of the resumed run.
        option: the one that names what is resumed.
    """
    if checkpoint is None and not updates:
        return "start it again: it has no checkpoint yet"
    is_own = checkpoint is None or Path(run_dir).resolve() in Path(checkpoint).resolve().parents
    return f"continue with {option}{run_dir if is_own else checkpoint}"


def create(plan: Plan, memory_format: Optional[str] = None) -> None:
    """Create the folder and write `plan.json` and `config.yaml` into it. ConfigError if that fails.

    `memory_format` is the requested one, if a resumed run has that of its checkpoint in place of it.
    """
    folder, config = Path(plan.run_dir), plan.config
    if memory_format is not None:
        training = config.training.model_copy(update={"memory_format": memory_format})
        config = config.model_copy(update={"training": training})
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        # The first file: with it the folder counts as a run folder, from which the same command continues.
        replace_file(folder / PLAN, (json.dumps(describe(plan), indent=2) + "\n").encode())
        evaluations = _evaluations_file(plan)
        if evaluations != folder / EVALUATIONS and evaluations.is_file():  # early stopping depends on them
            replace_file(folder / EVALUATIONS, evaluations.read_bytes())
        content = config.to_yaml().encode()
        replace_file(folder / CONFIG, content)
        seal = stored_code.seal_of(content)
        if seal is not None:
            replace_file(folder / SEAL, f"{seal}\n".encode())
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {folder}: {error.strerror}") from None


def _evaluations_file(plan: Plan) -> Path:
    """Return the evaluations of the run folder, or those of the resumed run if it has none yet."""
    own, resume = Path(plan.run_dir) / EVALUATIONS, plan.config.run.resume
    resumed = run_folder_of(resume) if resume and not own.exists() else None
    return own if resumed is None else resumed / EVALUATIONS


def write_summary(
    plan: Plan,
    metrics: MetricsAggregator,
    view: RunView,
    more: Optional[Dict[str, Any]] = None,
    restarts_before: int = 0,
) -> None:
    """Write `summary.json` from the state of a run that has ended, and further entries.

    `restarts_before` is the number of repairs during earlier starts of the run.

    Raises:
        RunError: it cannot be written.
    """
    started, ended, stopped, evaluations = view.started, view.ended, view.stopped, view.evaluations
    assert started is not None
    assert ended is not None
    # After a rollback the newest update can be one that the run has not done any more.
    is_done = view.update is not None and view.update.update <= ended.updates
    last = view.update if is_done else last_update(Path(plan.run_dir))
    names, tested = [metric.name for metric in plan.task.metrics], plan.task.evaluated_metrics
    summary = {
        "updates": ended.updates,
        "epochs": ended.updates / plan.updates_per_epoch,
        **{name: last.metrics.get(name) if last else None for name in names},
        **{f"test_{each.name}": evaluations[-1].metrics.get(each.name) if evaluations else None for each in tested},
        "evaluations": [flat(each) for each in evaluations],
        "samples_per_s": metrics.samples_per_s,
        **plan.task.part_rates(metrics.samples_per_s),
        "data_wait_share": metrics.data_wait_share,
        "seconds_to_first_update": metrics.first_update_s,
        "seconds_to_start": dict(started.seconds),
        "weights_sha256": ended.weights_sha256,
        "ema_sha256": ended.ema_sha256,
        "device": started.device,
        "restarts": restarts_before + view.restarts,
        "resizes": list(ended.resizes),
        "topology": topology_summary(plan),
        "interrupted": ended.interrupted,
        "preempted": ended.preempted,
        "stopped_early": {**dataclasses.asdict(stopped), "reason": stopped.reason} if stopped else None,
        "checkpoint": ended.checkpoint,
        **(more or {}),
    }
    path = Path(plan.run_dir) / SUMMARY
    try:
        replace_file(path, (strict_json(summary, indent=2) + "\n").encode())
    except OSError as error:
        raise RunError(f"the run is done, but {path} cannot be written: {error.strerror}") from None


def evaluations_until(plan: Plan, update: int) -> List[EvaluationDone]:
    """Return the evaluations that the run in this folder made up to `update`."""
    return [each for each in measured(EvaluationDone, _evaluations_file(plan)) if each.update <= update]


def last_update(run_dir: Path) -> Optional[UpdateDone]:
    """Return the newest update in the metrics of a run folder; None if there is none."""
    lines = (parse_records([line.text]) for line in last_lines(run_dir / METRICS))
    return next((each for records in lines for each in events_in(UpdateDone, records)), None)


def with_newest_update(run_dir: Path, state: RunState, is_behind: bool = False) -> RunState:
    """Return the state of a run with the newest update of its metrics, if `is_behind` or its process cannot write."""
    cannot_write = state.is_local and (not state.is_alive or state.is_stopped)
    if state.has_ended or not (is_behind or cannot_write):
        return state
    newest = None
    with contextlib.suppress(OSError, TypeError):  # TypeError: it has lines of another kind
        newest = last_update(run_dir)
    if newest is None or not isinstance(newest.update, int) or newest.update <= state.update:
        return state
    return dataclasses.replace(
        state,
        update=newest.update,
        loss=newest.loss if newest.has_results else state.loss,
        samples_per_s=newest.samples_per_s,
    )


def measured(event_type: Type[Measured], path: Path) -> List[Measured]:
    """Return the updates or evaluations in a file of a run folder, [] without one; truncated lines are skipped."""
    return events_in(event_type, parse_records(path.read_bytes().splitlines()) if path.is_file() else [])


def has_lost_checkpoints(folder: Path) -> bool:
    """Return whether an unfinished run has written checkpoints; for a folder from which none can be resumed."""
    if not run_state.is_unfinished(folder):
        return False
    try:
        lines = event_log.lines_with(folder / EVENTS, (b'"checkpoint_saved"',))
        return any(each.get("event") == "checkpoint_saved" for each in lines)
    except OSError:
        return False  # the start of the run says that the file cannot be read


def log_of(run_dir: Path) -> Path:
    """Return the log file of a detached run's coordinator."""
    return run_dir / LOGS / "coordinator.log"


class CoordinatorLogTimes(Callback):
    """Marks the times of the coordinator's log while events arrive; without such a log it does nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._times = LogTimes(log_of(run_dir))

    def on_event(self, event: Event) -> None:
        """Write a mark, unless the last one is recent."""
        self._times.mark()


_OWN = "."  # the run folder itself: the run went on


def origin_of(plan: Plan) -> Optional[str]:
    """Return what the plan resumes from: a path relative to the run folder if it is in it; None without `--resume`."""
    if not plan.config.run.resume:
        return None
    path, folder = Path(plan.config.run.resume).resolve(), Path(plan.run_dir).resolve()
    return str(path.relative_to(folder)) if path == folder or folder in path.parents else str(path)


def is_begun(plan: Plan) -> bool:
    """Return whether the folder has an unfinished run that began from the checkpoint or run that `--resume` names."""
    folder, origin = Path(plan.run_dir), origin_of(plan)
    return origin not in (None, _OWN) and run_state.is_unfinished(folder) and _recorded(folder) == origin


def continues(plan: Plan) -> bool:
    """Return whether the command began the unfinished run in the folder, which it continues.

    One that names a checkpoint of the folder, and other settings than those of the newest state, begins again from it.
    """
    if not is_begun(plan):
        return False
    newest, _ = resume.newest_valid(storage.checkpoints_folder(plan.run_dir), verify=False)
    is_elsewhere = Path(str(origin_of(plan))).is_absolute()
    return is_elsewhere or newest is None or resume.difference_to(plan, newest.manifest, []) is None


def _recorded(folder: Path) -> Optional[str]:
    """Return the record of the last start that did not continue the run in its folder."""
    origin: Optional[str] = None
    for line in event_log.lines_with(folder / layout.EVENTS, (b'"run_started"',)):
        if line.get("event") == "run_started" and line.get("resumed_from") != _OWN:
            origin = line.get("resumed_from")
    return origin
