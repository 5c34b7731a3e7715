"""The seam between the coordinator and the instances: how they are run.

`inline` runs one instance in this process, `ray` runs each in an actor on its host. Both take a plan and nothing else,
and the coordinator cannot tell them apart.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Tuple

from typing_extensions import Protocol

from raypod.events import CallReport, InstanceStarted
from raypod.plan import Leg


class Fleet(Protocol):
    """All instances of a run. Every wait inside is bounded; failures are raised as errors of raypod's tree."""

    start_seconds: List[Tuple[str, float]]  # where the time of `start` went, in order

    def start(self) -> List[InstanceStarted]:
        """Bring all instances up and let them meet. In instance order."""

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """Call a method of every instance at the same time; the results in instance order."""

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """Run a leg in every instance; reports of all of them as they come.

        Once `stop_requested()` is true, all instances end after the same call, as soon as they can.
        """

    def close(self) -> None:
        """End every process, actor, placement group and session that `start` made. Harmless when called again."""
