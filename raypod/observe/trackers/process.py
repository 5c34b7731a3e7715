"""The process of one tracker: `python -m raypod.observe.trackers.process`, started by `companions.py`.

It follows the files of the run, so that the coordinator does nothing for it. Standard input ends with the run: a word
tells how it ended, and without one the coordinator has died. From then on the process has a limited time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from raypod.errors import summarize_exception
from raypod.observe.trackers import companions
from raypod.observe.trackers.companions import TrackerRecord
from raypod.observe.trackers.follower import Follower, newest_steps
from raypod.observe.trackers.tracker import KILLED, Point, RunFacts, Steps, Tracker, log_points
from raypod.plan import layout, user_code
from raypod.plan.resolve import read_yaml
from raypod.runs import run_state
from raypod.system.companion import Input, SavedState, attending
from raypod.system.files import make_folder, parse_json
from raypod.system.redaction import Redaction

_KINDS = {
    "mlflow": "raypod.observe.trackers.mlflow_tracker:MlflowTracker",
    "wandb": "raypod.observe.trackers.wandb_tracker:WandbTracker",
}
_POLL_S = 1.0
_POINTS = 500  # logged at once, before the memory is written
_RETRY_S = (1.0, 2.0, 5.0, 15.0, 60.0)  # between attempts; the last one repeats
_REPORT = (layout.REPORT, layout.SUMMARY, layout.CONFIG, layout.PLAN)
_NICE = 10
_MANUAL_S = 600.0  # if a person starts this process


class Session:
    """Keeps a tracker up to date, whatever it raises."""

    def __init__(self, make: Callable[[], Tracker], run_dir: Path, started_unix_s: float, path: Path) -> None:
        """`path` is the file of the memory."""
        self._make, self._run_dir, self._started_unix_s = make, run_dir, started_unix_s
        self._file = SavedState(path, TrackerRecord())
        self._redaction = Redaction(os.environ)
        self._tracker: Optional[Tracker] = None
        self._follower: Optional[Follower] = None
        self._points: List[Point] = []  # read, and not recorded

    def follow(self, entered: Input, artifacts: str) -> None:
        """Record the run until it ends, then its artifacts and its end; try again after errors."""
        failures, words = 0, [KILLED]
        self._file.remember(error="", is_complete=False)  # an earlier process may have completed its part
        while True:
            has_ended = entered.has_ended
            words += entered.take()
            try:
                self._record(has_ended)
                if has_ended:
                    self._finish(words[-1], artifacts)
                    return
                failures = 0
            except Exception as error:  # noqa: BLE001 - a tracker can raise anything
                traceback.print_exc()
                failures += 1
                self._file.remember(error=self._redaction.clean(summarize_exception(error)))
                self._tracker = None
            entered.wait(_RETRY_S[min(failures, len(_RETRY_S)) - 1] if failures else _POLL_S)

    def _record(self, has_ended: bool) -> None:
        tracker, follower = self._opened()
        self._points += follower.poll(has_ended)
        while self._points:
            part = self._points[:_POINTS]
            log_points(tracker, part)
            self._file.remember(**newest_steps(part, self._file.state.steps)._asdict())
            del self._points[:_POINTS]

    def _opened(self) -> Tuple[Tracker, Follower]:
        if self._tracker is None or self._follower is None:
            tracker = self._make()
            facts = RunFacts(self._run_dir.resolve().name, self._run_dir, parameters_of(self._run_dir))
            run_id = tracker.open(facts, self._file.state.run_id)
            self._file.remember(run_id=run_id)
            steps, found = self._file.state.steps, tracker.recorded()
            if found is not None:  # what was recorded just before this process died is not in the memory
                steps = Steps(max(steps.training, found.training), max(steps.test, found.test), steps.media)
            before = self._follower
            self._follower, self._points = Follower(self._run_dir, self._started_unix_s, steps), []
            if before is not None:
                self._follower.take_notes_of(before)
            self._tracker = tracker
            self._file.remember(training=steps.training, test=steps.test, error="")
        return self._tracker, self._follower

    def _finish(self, word: str, artifacts: str) -> None:
        assert self._tracker is not None, "the points were recorded before"
        for path, name in artifacts_of(self._run_dir, artifacts):
            self._tracker.add_artifact(path, name)
        facts, abandoned = result_of(self._run_dir), self._follower.abandoned if self._follower else []
        if abandoned:
            facts["abandoned_updates"] = f"{min(abandoned)}-{max(abandoned)}"
        self._tracker.close(word, facts)
        self._file.remember(error="", is_complete=True)


def parameters_of(run_dir: Path) -> Dict[str, str]:
    """Return the config of a run as text by section.key, without defaults that are None."""
    sections = read_yaml(run_dir / layout.CONFIG)
    return {
        f"{section}.{key}": str(value)
        for section, entries in sections.items()
        for key, value in entries.items()
        if value is not None
    }


def artifacts_of(run_dir: Path, kind: str) -> Iterator[Tuple[Path, str]]:
    """Yield (path, name) of the artifacts of a kind that exist: none, report, checkpoint or all."""
    for name in _REPORT if kind in ("report", "all") else ():
        if (run_dir / name).is_file():
            yield run_dir / name, name
    latest = run_dir / "checkpoints" / "LATEST"
    if kind in ("checkpoint", "all") and latest.is_file():
        yield latest.parent / latest.read_text().strip(), "checkpoint"


def result_of(run_dir: Path) -> Dict[str, str]:
    """Return facts about the result of a run, as text."""
    state = run_state.read(run_dir)
    facts = {"state": state.state, "update": state.update, "restarts": state.restarts} if state is not None else {}
    path = run_dir / layout.SUMMARY
    if path.is_file():
        facts["weights_sha256"] = parse_json(path.read_text()).get("weights_sha256", "")
    return {name: str(value) for name, value in facts.items()}


def make_tracker(name: str) -> Tracker:
    """Return a new tracker: of raypod, or `module:Class`."""
    if name in _KINDS:
        module, _, kind = _KINDS[name].partition(":")
        built_in: Tracker = getattr(importlib.import_module(module), kind)()
        return built_in
    own: Tracker = user_code.call(name, "run.trackers")
    return own


def main() -> int:
    """Follow a run; return 0 once everything is recorded."""
    parser = argparse.ArgumentParser(prog="raypod.observe.trackers.process")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("tracker")
    parser.add_argument("--artifacts", default="report")
    parser.add_argument("--timeout-s", type=float, default=_MANUAL_S)
    parser.add_argument("--started-unix-s", type=float, help="default: when config.yaml was written")
    args = parser.parse_args()
    config = args.run_dir / layout.CONFIG
    if not config.is_file():
        parser.error(f"{args.run_dir} has no {layout.CONFIG}; is it a run folder?")
    started_unix_s = config.stat().st_mtime if args.started_unix_s is None else args.started_unix_s
    os.nice(_NICE)
    path = companions.path_of(args.run_dir, args.tracker)
    make_folder(path.parent)
    lock, setting = path.with_suffix(".lock"), "run.tracker_timeout_s"
    with attending(args.run_dir, lock, args.timeout_s, setting, Redaction(os.environ)) as entered:
        session = Session(lambda: make_tracker(args.tracker), args.run_dir, started_unix_s, path)
        session.follow(entered, args.artifacts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
