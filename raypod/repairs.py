"""Keeping a run going: who is lost is replaced, and everybody goes on from the newest state that a survivor has.

The arithmetic of a run does not depend on where its replicas live, nor on which process they live in. So nothing is
computed twice by an instance that has done it, and the result is that of a run without a failure.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

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
            yield from self._repair(broken, set())

    def until_done(self, update: int, begin: Callable[[], Iterator[Event]]) -> Iterator[Event]:
        """The same for what is to be done after `update` updates: begun again after a repair, as long as it is after
        so many that the run goes on.
        """
        while self._metrics.position == update:
            try:
                yield from begin()
            except FleetBroken as broken:
                yield from self._repair(broken, set())
            else:
                return

    def move(self, hosts: Sequence[str]) -> Iterator[Event]:
        """Let the instances on `hosts`, which are about to be taken away, live elsewhere; nobody's state is lost."""
        moving = {index for index, host in enumerate(self._fleet.hosts()) if host in hosts}
        try:
            yield from self._replace(tuple(sorted(moving)), moving, self._policy.may_share_hosts, time.monotonic())
        except FleetBroken as broken:
            yield from self._repair(broken, moving)

    def can_move(self, hosts: Sequence[str]) -> bool:
        """Whether the instances on `hosts` have anywhere else to live, and others know what they know."""
        moving = tuple(index for index, host in enumerate(self._fleet.hosts()) if host in hosts)
        is_known = len(moving) < self._plan.geometry.num_instances
        return is_known and self._fleet.has_room_for(moving, self._policy.may_share_hosts)

    def _repair(self, broken: FleetBroken, replaced: Set[int]) -> Iterator[Event]:
        """`replaced` already: by what another failure broke off."""
        began_s = time.monotonic()
        while True:
            yield from broken.losses
            decision = self._policy.decide(broken, self._metrics.position, time.monotonic())
            if decision.give_up is not None:
                raise decision.give_up from broken
            replaced = replaced | set(decision.replace)
            try:
                yield from self._replace(decision.replace, replaced, decision.may_share_hosts, began_s)
                return
            except FleetBroken as again:
                broken = again

    def _replace(
        self, lost: Tuple[int, ...], replaced: Set[int], may_share_hosts: bool, began_s: float
    ) -> Iterator[Event]:
        """Replace `lost`; with them, `replaced` are those that are new since the run got on."""
        positions = self._fleet.repair(lost, may_share_hosts)
        source, update, passed_over = self._reseed(positions)
        told = self._metrics.settle(update, time.monotonic())
        yield from self._metrics.take_calls()
        yield from told
        self._saving.generation += 1
        if 0 in replaced:  # who wrote the checkpoints
            self._saving.forget_unfinished()
        hosts, new = self._fleet.hosts(), tuple(sorted(replaced))
        places = tuple(hosts[index] for index in new)
        seconds = time.monotonic() - began_s
        restarts, generation = self._policy.restarts, self._saving.generation
        yield Repaired(new, places, source, update, seconds, restarts, generation, passed_over)

    def _reseed(self, positions: Dict[int, int]) -> Tuple[str, int, Tuple[str, ...]]:
        """Give everybody the newest state there is; where it came from, its update, and damaged ones in words."""
        root = failure.newest(positions)
        if root is not None:
            seed(self._fleet, None, root, failure.receivers(positions, root, self._plan.geometry.num_instances))
            return f"instance {root}", positions[root], ()
        good, passed_over = newest_good(folder_of(Path(self._plan.run_dir)))
        saved = good or self._resumed
        seed(self._fleet, saved)
        self._saving.go_back_to(saved)
        source, update = (str(saved.path), saved.update) if saved is not None else ("the beginning", 0)
        return source, update, tuple(passed_over)


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
