"""Read the points of a run from its files while it writes them, each once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Dict, Iterator, List

from raypod.events import EvaluationDone, UpdateDone
from raypod.observe.trackers.tracker import Point, Steps
from raypod.plan.layout import EVALUATIONS, MEDIA, METRICS
from raypod.runs.growing_file import GrowingFile
from raypod.runs.media import LIST, LoggedMedia, logged_media
from raypod.runs.metrics import events_in, traces_of

_MOST_VALUES = 100_000  # updates: a rollback to a checkpoint repeats fewer


class Follower:
    """Follows `metrics.jsonl`, `evaluations.jsonl` and the media of a run folder.

    Steps that were recorded before are skipped: a run that is rolled back, or resumed from an older
    checkpoint, computes the same values again.
    """

    def __init__(self, run_dir: Path, started_unix_s: float, recorded: Steps) -> None:
        """`started_unix_s` is the time of day from which the times of the coordinator's process count."""
        self._run_dir, self._media = run_dir, GrowingFile(run_dir / MEDIA / LIST)
        self._metrics, self._tests = GrowingFile(run_dir / METRICS), GrowingFile(run_dir / EVALUATIONS)
        self._started_unix_s, self._seen = started_unix_s, recorded
        self._newest_s = started_unix_s
        self._held: List[EvaluationDone] = []  # of an update whose line is not read yet
        self._held_media: List[LoggedMedia] = []  # of an update that can get more of them
        self._values: Dict[int, int] = {}  # hashes of the metrics, by update
        self.abandoned: List[int] = []  # the updates whose recorded metrics a rollback has replaced by others

    def poll(self, is_last: bool = False) -> List[Point]:
        """Return the new points in ascending order of steps. `is_last`: the files do not grow any more.

        The metrics are read first: when the line of an update is there, so is the evaluation of the one before.
        """
        points = []
        for update in events_in(UpdateDone, self._metrics.read_records().records):
            self._note_values(update)
            if update.update > self._seen.training:
                self._seen = self._seen._replace(training=update.update)
                self._newest_s = self._started_unix_s + update.time_s
                values = update.metrics if not update.missing_reports else {}
                values = {**values, "samples_per_s": update.samples_per_s, **update.part_rates, **traces_of(update)}
                points.append(self._point(update.update, "training", values))
        self._held += events_in(EvaluationDone, self._tests.read_records().records)
        ready = [each for each in self._held if is_last or each.update <= self._seen.training]
        self._held = [each for each in self._held if each not in ready]
        for test in sorted(ready, key=lambda each: each.update):
            if test.update > self._seen.test:
                self._seen = self._seen._replace(test=test.update)
                points.append(self._point(test.update, "test", test.metrics))
        points += self._new_media(is_last)
        return sorted(points, key=lambda each: each.step)

    def _new_media(self, is_last: bool) -> Iterator[Point]:
        """Yield the media of the updates before the newest one: callbacks have logged them before its line."""
        self._held_media += logged_media(self._run_dir, self._media.read_records().records)
        newest = math.inf if is_last else self._seen.training - 1
        ready = [each for each in self._held_media if each.update <= newest]
        self._held_media = [each for each in self._held_media if each.update > newest]
        for media in ready:
            if media.update > self._seen.media:
                yield Point(media.update, self._newest_s, {}, media)
        self._seen = self._seen._replace(media=max([self._seen.media, *(each.update for each in ready)]))

    def _note_values(self, update: UpdateDone) -> None:
        """Note an update that was recorded with other metrics: no tracker can replace them."""
        if update.missing_reports:
            return
        values = hash(repr(sorted(update.metrics.items())))
        if len(self._values) > _MOST_VALUES:
            del self._values[next(iter(self._values))]
        if self._values.setdefault(update.update, values) != values and update.update not in self.abandoned:
            self.abandoned.append(update.update)

    def take_notes_of(self, before: Follower) -> None:
        """Take over what the follower before this one, in the same process, has noted of rollbacks."""
        self._values, self.abandoned = before._values, before.abandoned

    def _point(self, step: int, group: str, values: Dict[str, float]) -> Point:
        return Point(step, self._newest_s, {f"{group}/{name}": value for name, value in values.items()})


def newest_steps(points: List[Point], before: Steps) -> Steps:
    """Return the newest steps after `points` were recorded."""
    for point in points:
        if point.media is not None:
            before = before._replace(media=max(before.media, point.step))
        elif any(name.startswith("test/") for name in point.values):
            before = before._replace(test=max(before.test, point.step))
        else:
            before = before._replace(training=max(before.training, point.step))
    return before
