"""The evaluations of a run: when they are due, what they found, and that each is made once."""

from __future__ import annotations

import math
from typing import Iterator, List, Optional, Sequence

from raypod.events import EvaluationDone, EvaluationReport, Event
from raypod.fleet import Fleet
from raypod.plan import Plan
from raypod.saving import Saving


class Evaluations:
    """Of one run. After as many updates the weights are the same, so what is known is not found again."""

    def __init__(self, plan: Plan, fleet: Fleet, saving: Saving, known: Sequence[EvaluationDone]) -> None:
        """`known`: those that the run had made before it went on."""
        self._plan, self._fleet, self._saving = plan, fleet, saving
        self._found = {each.update: each for each in known}

    def after(self, update: int) -> Iterator[Event]:
        """Evaluate after `update` updates, if that is due and has not been done."""
        if not self._plan.is_evaluated_after(update) or update in self._found:
            return
        reports: List[EvaluationReport] = self._fleet.call("evaluate")
        samples = sum(report.samples for report in reports)
        loss = math.fsum(report.loss_sum for report in reports) / samples
        accuracy = 100.0 * sum(report.correct for report in reports) / samples
        epoch = (update - 1) // self._plan.updates_per_epoch + 1
        self._found[update] = EvaluationDone(samples, loss, accuracy, update, epoch)
        self._saving.add_accuracy(update, accuracy)
        yield self._found[update]

    def accuracy_after(self, update: int) -> Optional[float]:
        """The test accuracy after `update` updates, in percent; None where it is not known."""
        found = self._found.get(update)
        return found.accuracy if found else None
