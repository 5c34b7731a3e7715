"""The files of a run folder that grow with its events: metrics, evaluations, ledger, and TensorBoard event files."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any, List, Optional, Tuple

from raypod.errors import ConfigError, RunError
from raypod.events import CallDone, CheckpointBegun, EvaluationDone, Event, Repaired, RunStarted, UpdateDone
from raypod.plan.config import Config
from raypod.plan.plan import Plan
from raypod.record.ledger import Ledger
from raypod.record.metrics import JsonLines
from raypod.record.run_folder import EVALUATIONS, METRICS

TENSORBOARD_FOLDER = "tensorboard"
_FLUSH_S = 10  # bounds what is not yet visible while the run continues


class Sinks:
    """Writes the events of a run to its files. `RunStarted` opens them: a run that fails to start writes none."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._metrics: Optional[JsonLines] = None
        self._evaluations: Optional[JsonLines] = None
        self._ledger: Optional[Ledger] = None
        self._tensorboard: Optional[TensorBoardWriter] = None

    def handle(self, event: Event) -> None:
        """Write an event to the files that record it."""
        if self._tensorboard is not None:
            self._tensorboard.handle(event)
        if isinstance(event, RunStarted):
            self._open(event)
        elif isinstance(event, Repaired) and self._ledger is not None:
            self._ledger.begin(event.generation, event.update)
        elif isinstance(event, UpdateDone) and self._metrics is not None:
            self._metrics.write(event)
        elif isinstance(event, EvaluationDone) and self._evaluations is not None:
            self._evaluations.write(event)
        elif isinstance(event, CallDone) and self._ledger is not None:
            self._ledger.write(event)
        elif isinstance(event, CheckpointBegun):
            self._sync()

    def _open(self, event: RunStarted) -> None:
        folder = Path(self._plan.run_dir)
        self._metrics = JsonLines(folder / METRICS, event.first_update)
        self._evaluations = JsonLines(folder / EVALUATIONS, event.first_update)
        self._ledger = Ledger(self._plan)
        self._ledger.begin(event.generation, event.first_update)
        if self._plan.config.run.tensorboard:
            self._tensorboard = TensorBoardWriter(folder, event.first_update)

    def _sync(self) -> None:
        """Flush all files, so that a run that resumes from the checkpoint finds every line before it."""
        for sink in (self._metrics, self._evaluations, self._ledger, self._tensorboard):
            if sink is not None:
                sink.sync()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        """Close the files. RunError if lines could not be written (the disk is full) and there is no other error."""
        failed = []
        for sink in (self._metrics, self._evaluations, self._ledger, self._tensorboard):
            try:
                if sink is not None:
                    sink.close()
            except OSError as error:
                failed.append(error.strerror or str(error))
        self._metrics = self._evaluations = self._ledger = self._tensorboard = None
        if failed and kind is None:
            raise RunError(f"cannot write the last lines of metrics and ledger in {self._plan.run_dir}: {failed[0]}")


def check_tensorboard(config: Config) -> None:
    """Raise ConfigError if the run writes TensorBoard event files and the package `tensorboard` is not installed."""
    if config.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed: pip install 'raypod[tensorboard]'"
        )


class TensorBoardWriter:
    """Writes the scalars of a run with `torch.utils.tensorboard.SummaryWriter`.

    A full disk does not stop the run: points that are not yet on the disk stay in memory, and `sync` and `close`
    write them again, into a new event file.
    """

    def __init__(self, run_dir: Path, first_update: int) -> None:
        """Hide the points after `first_update`, from which a resumed run continues, in earlier event files."""
        # Imported here: it needs an optional package, and it imports torch, which reads OMP_NUM_THREADS.
        self._module: Any = importlib.import_module("torch.utils.tensorboard")
        self._folder = str(run_dir / TENSORBOARD_FOLDER)
        self._purge_step = first_update + 1  # the first step that is not on the disk
        self._points: List[Tuple[str, float, int]] = []  # tag, value, step; not on the disk yet
        self._writer: Any = None
        self.sync()

    def handle(self, event: Event) -> None:
        """Add the points of an event, if it has any."""
        points: List[Tuple[str, float, int]] = []
        if isinstance(event, UpdateDone):
            values = {"loss": event.loss, "accuracy": event.accuracy, "samples_per_s": event.samples_per_s}
            points = [(f"training/{name}", value, event.update) for name, value in values.items()]
        elif isinstance(event, EvaluationDone):
            points = [("test/loss", event.loss, event.update), ("test/accuracy", event.accuracy, event.update)]
        self._points += points
        if self._writer is not None:
            try:
                self._add(points)
            except OSError:
                self._writer = None

    def sync(self) -> None:
        """Write all points to the disk, if there is space."""
        with contextlib.suppress(OSError):
            self._flush()

    def close(self) -> None:
        """Close the event file. OSError if points could not be written."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        try:
            if self._writer is None:
                self._writer = self._module.SummaryWriter(
                    self._folder, purge_step=self._purge_step, flush_secs=_FLUSH_S
                )
                self._add(self._points)
            self._writer.flush()
        except OSError:
            self._writer = None  # its thread has ended
            raise
        if self._points:
            self._purge_step = self._points[-1][2] + 1
            self._points.clear()

    def _add(self, points: List[Tuple[str, float, int]]) -> None:
        for tag, value, step in points:
            self._writer.add_scalar(tag, value, step)
