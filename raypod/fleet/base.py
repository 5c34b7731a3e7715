"""The seam between the coordinator and the instances: how they are run.

`inline` runs one instance in this process, `ray` runs each in an actor on its host. Both take a plan and nothing else,
and the coordinator cannot tell them apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Tuple

from typing_extensions import Protocol

from raypod.errors import InstanceFailed, RunError
from raypod.events import CallReport, InstanceLost, InstanceStarted
from raypod.plan.plan import Leg


@dataclasses.dataclass(eq=False)
class FleetBroken(RunError):
    """Scene: an instance was killed, and the others wait for it in vain. `Fleet.repair` makes the fleet whole again.

    `losses`: who is given up, the first cause first; nobody if the instances have lost each other, as `cause` says.
    """

    losses: Tuple[InstanceLost, ...]
    cause: str

    def __str__(self) -> str:
        return str(failure_of(self.losses[0])) if self.losses else f"the instances have lost each other: {self.cause}"


def failure_of(loss: InstanceLost) -> InstanceFailed:
    """The error that ends a run which is not repaired."""
    return InstanceFailed(loss.instance, loss.host, loss.cause, loss.log_file)


class Fleet(Protocol):
    """All instances of a run. Every wait inside is bounded; failures are raised as errors of raypod's tree.

    `call` and `run` raise FleetBroken where instances were lost and others may go on.
    """

    start_seconds: List[Tuple[str, float]]  # where the time of `start` went, in order

    def start(self) -> List[InstanceStarted]:
        """Bring all instances up and let them meet. In instance order."""

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """Call a method of every instance at the same time; the results in instance order."""

    def run(self, leg: Leg, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """Run a leg in every instance; reports of all of them as they come.

        Once `stop_requested()` is true, all instances end after the same call, as soon as they can.
        """

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """Replace the instances `lost`, and let all meet anew.

        A replacement takes the place of the dead where its host still answers, else a spare host of the cluster; with
        `may_share_hosts`, else any host. The survivors keep their processes; the result is, for each of them, the
        update whose state it has (-1 for none). A replacement has no state.

        Raises:
            FleetBroken: further instances were lost.
            RunError: there is no room for a replacement.
        """

    def draining(self) -> List[str]:
        """The hosts of the run that somebody is about to take away. Cheap: asked between any two reports."""

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        """Whether there are hosts for these instances, other than those that are about to be taken away."""

    def hosts(self) -> List[str]:
        """The host on which each instance lives now, in instance order."""

    def close(self) -> None:
        """End every process, actor, placement group and session that `start` made. Harmless when called again."""
