"""From which checkpoint a run was begun with `--resume`: the same command then continues it, and does not begin again.

The event `run_started` has the record, so that it lasts as long as what the run has done since.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import event_log, run_state
from raypod.training.checkpoint import resume, storage

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
