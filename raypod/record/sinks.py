"""The files of a run folder that grow with its events: metrics, evaluations, ledger, and curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from raypod.errors import RunError
from raypod.events import CallDone, CheckpointBegun, EvaluationDone, Event, Repaired, RunStarted, UpdateDone
from raypod.metrics import JsonLines
from raypod.plan import Plan
from raypod.record.ledger import Ledger
from raypod.record.run_folder import EVALUATIONS, METRICS
from raypod.record.tensorboard import EventFile


class Sinks:
    """Takes the events of a run. They are opened by its start: a run that could not start leaves its folder free."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._metrics: Optional[JsonLines] = None
        self._evaluations: Optional[JsonLines] = None
        self._ledger: Optional[Ledger] = None
        self._curves: Optional[EventFile] = None

    def take(self, event: Event) -> None:
        """Write what belongs to an event."""
        if self._curves is not None:
            self._curves.take(event)
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
            self._curves = EventFile(folder, event.first_update)

    def _sync(self) -> None:
        """Whoever goes on from a checkpoint finds every line before it, also after a power loss."""
        for sink in (self._metrics, self._evaluations, self._ledger):
            if sink is not None:
                sink.sync()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        """Close the files. RunError if lines could not be written (the disk is still full) and nothing else failed."""
        failed = []
        for sink in (self._metrics, self._evaluations, self._ledger, self._curves):
            try:
                if sink is not None:
                    sink.close()
            except OSError as error:
                failed.append(error.strerror or str(error))
        self._metrics = self._evaluations = self._ledger = self._curves = None
        if failed and kind is None:
            raise RunError(f"cannot write the last lines of metrics and ledger in {self._plan.run_dir}: {failed[0]}")
