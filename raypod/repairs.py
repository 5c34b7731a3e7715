"""Keeping a run going: who is lost is replaced, and everybody goes on from the newest state that a survivor has.

The arithmetic of a run does not depend on where its replicas live, nor on which process they live in. So nothing is
computed twice by an instance that has done it, and the result is that of a run without a failure.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

from raypod import failure
from raypod.checkpoint.folder import folder_of
from raypod.checkpoint.manifest import Checkpoint
from raypod.checkpoint.reader import newest_good
from raypod.errors import CheckpointDamaged, WeightsDiffer
from raypod.events import Event, Repaired
from raypod.failure import FailurePolicy
from raypod.fleet import Fleet, FleetBroken
from raypod.metrics import MetricsFold
from raypod.plan import Plan
from raypod.saving import Saving
from raypod.state.seeding import new_seeding


class Repairs:
    """Of one run."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        metrics: MetricsFold,
        saving: Saving,
        device: str,
        resumed: Optional[Checkpoint],
    ) -> None:
        self._plan, self._fleet, self._metrics, self._saving = plan, fleet, metrics, saving
        self._resumed = resumed
        self._policy = FailurePolicy(device, plan.config.run.max_restarts)

    def once(self, action: Iterator[Event]) -> Iterator[Event]:
        """The events of `action`; if the fleet breaks in it, those of the repair, and no more of the action's.

        Raises:
            RunError: it is not to be repaired; the first cause.
        """
        try:
            yield from action
        except FleetBroken as broken:
            yield from self._repair(broken)

    def until_done(self, update: int, begin: Callable[[], Iterator[Event]]) -> Iterator[Event]:
        """The same for what is to be done after `update` updates: begun again after a repair, as long as it is after
        so many that the run goes on.
        """
        while self._metrics.position == update:
            try:
                yield from begin()
            except FleetBroken as broken:
                yield from self._repair(broken)
            else:
                return

    def _repair(self, broken: FleetBroken) -> Iterator[Event]:
        while True:
            began_s = time.monotonic()
            yield from broken.losses
            decision = self._policy.decide(broken, self._metrics.position, began_s)
            if decision.give_up is not None:
                raise decision.give_up from broken
            try:
                positions = self._fleet.repair(decision.replace, decision.may_share_hosts)
                source, update = self._reseed(positions)
            except FleetBroken as again:
                broken = again
                continue
            told = self._metrics.settle(update, time.monotonic())
            yield from self._metrics.take_calls()
            yield from told
            self._saving.generation += 1
            if 0 in decision.replace:  # who wrote the checkpoints
                self._saving.forget_unfinished()
            hosts = self._fleet.hosts()
            places = tuple(hosts[index] for index in decision.replace)
            seconds = time.monotonic() - began_s
            restarts, generation = self._policy.restarts, self._saving.generation
            yield Repaired(decision.replace, places, source, update, seconds, restarts, generation)
            return

    def _reseed(self, positions: Dict[int, int]) -> Tuple[str, int]:
        """Give everybody the newest state there is; where it came from, and its update."""
        root = failure.newest(positions)
        if root is not None:
            seed(self._fleet, None, root, failure.receivers(positions, root, self._plan.geometry.num_instances))
            return f"instance {root}", positions[root]
        saved = newest_good(folder_of(Path(self._plan.run_dir)))[0] or self._resumed
        seed(self._fleet, saved)
        return (str(saved.path), saved.update) if saved is not None else ("the beginning", 0)


def seed(fleet: Fleet, saved: Optional[Checkpoint], root: int = 0, receivers: Optional[Sequence[int]] = None) -> None:
    """The receivers (default: all others) take over the state of instance `root`, its own or that of a checkpoint.

    Raises:
        WeightsDiffer: proved by the hash of each.
        CheckpointDamaged: the checkpoint does not hold what it should.
    """
    seeding = new_seeding(fleet.call("open_seeding"), root, receivers)
    hashes = fleet.call("seed_weights", seeding, str(saved.path) if saved else None)
    if len(set(hashes)) > 1:
        raise WeightsDiffer(dict(enumerate(hashes)))
    if saved is not None and hashes[0] != saved.manifest.weights_sha256:
        raise CheckpointDamaged(str(saved.path), "the hash of its weights is not the one it was saved with")
