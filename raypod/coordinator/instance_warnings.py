"""The warnings that instances report, as events."""

from __future__ import annotations

from typing import Iterator, Sequence, Set, Union

from raypod.events import CallReport, EvaluationReport, InstanceWarned
from raypod.plan.plan import Plan


class InstanceWarnings:
    """Yields each warning of a run once: an instance that replaces another one warns again."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: Set[str] = set()

    def new_in(self, reports: Sequence[Union[CallReport, EvaluationReport]]) -> Iterator[InstanceWarned]:
        """Yield the warnings of reports that no earlier report had."""
        for report in reports:
            for text in report.warnings:
                if text not in self._known:
                    self._known.add(text)
                    yield InstanceWarned(report.instance, text, self._plan.log_file(report.instance))
