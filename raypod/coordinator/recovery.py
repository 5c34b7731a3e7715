"""Keeping a run going: who is lost is replaced, and everybody goes on from the newest state that a survivor has.

The arithmetic of a run does not depend on where its replicas live, nor on which process they live in. So nothing is
computed twice by an instance that has done it, and the result is that of a run without a failure.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from raypod.checkpoint.format import Checkpoint, folder_of
from raypod.checkpoint.resume import newest_good
from raypod.coordinator.checkpoint_schedule import Saving
from raypod.errors import CheckpointDamaged, RunError, WeightsDiffer
from raypod.events import Event, Repaired
from raypod.fleet.base import Fleet, FleetBroken, failure_of
from raypod.instance.seeding import new_seeding
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsFold


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
        root = newest(positions)
        if root is not None:
            seed(self._fleet, None, root, receivers(positions, root, self._plan.geometry.num_instances))
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


# --- from failure: What is done about a failure: pure policy. The coordinator tells what happened, and carries out the decision.
#
# | what happened | emulated SDK | IPUs |
# |---|---|---|
# | an instance died, is silent or stuck | replaced; others go on with what their devices hold | replaced; note 1 |
# | its program raised | replaced like a dead one; the same exception at the same update twice ends the run | the same |
# | the instances lost each other, all alive | they meet anew | they meet anew |
# | nobody is left who has trained | from the newest good checkpoint, else from the beginning | the same |
# | Ray drains a host | its instances move, uncounted; with nowhere to go the run ends with a checkpoint | the same |
# | a replacement's place | its old one; a spare host; any host | its old one; a spare host with free IPUs |
# | more than `run.max_restarts` | the run fails with its first cause | the same |
#
# Note 1: one dead instance ends the others' device run. All detach, go on from the newest weights that one of them has
# read back, and attach.
#

REFILL_S = 3600.0  # of progress, after which all restarts are available again


@dataclasses.dataclass(frozen=True)
class Policy:
    """What differs between devices. (That a failed device run cannot be read back, an instance finds out itself.)"""

    may_share_hosts: bool  # whether a replacement may crowd a host that has instances already


POLICIES = {"emulated": Policy(may_share_hosts=True), "ipu": Policy(may_share_hosts=False)}


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do: replace these instances; or give up, with this error."""

    replace: Tuple[int, ...]
    may_share_hosts: bool
    give_up: Optional[RunError] = None


class FailurePolicy:
    """Decides, failure after failure of one run."""

    def __init__(self, device: str, max_restarts: int) -> None:
        self._policy = POLICIES[device]
        self.may_share_hosts = self._policy.may_share_hosts
        self._max_restarts = self._left = max_restarts
        self._last_s: Optional[float] = None
        self._first = ""
        self._raised: Set[Tuple[str, int]] = set()
        self.restarts = 0

    def decide(self, broken: FleetBroken, update: int, now_s: float) -> Decision:
        """What to do about instances that were lost after `update` updates of the run; `now_s` by any steady clock."""
        if self._last_s is not None and now_s - self._last_s >= REFILL_S:
            self._left, self._first = self._max_restarts, ""
        self._last_s = now_s
        repeated = self._repeated(broken, update)
        if repeated is not None:
            return self._given_up(repeated, f"the same happened at update {update} before")
        if not self._left:
            return self._given_up(broken, self._spent(broken))
        self._left -= 1
        self.restarts += 1
        self._first = self._first or str(broken)
        lost = tuple(sorted({loss.instance for loss in broken.losses}))
        return Decision(lost, self._policy.may_share_hosts)

    def _repeated(self, broken: FleetBroken, update: int) -> Optional[FleetBroken]:
        """An exception of the program that was raised at this update before: it always will be."""
        raised = [loss for loss in broken.losses if loss.kind == "raised"]
        again = [loss for loss in raised if (loss.cause, update) in self._raised]
        self._raised.update((loss.cause, update) for loss in raised)
        return FleetBroken(tuple(again), broken.cause) if again else None

    def _spent(self, broken: FleetBroken) -> str:
        if not self._max_restarts:
            return ""
        first = " the same" if str(broken) == self._first else f": {self._first}"
        return f"not repaired, as --max-restarts {self._max_restarts} is spent; the first failure was{first}"

    def _given_up(self, broken: FleetBroken, why: str) -> Decision:
        told = f" ({why})" if why else ""
        if not broken.losses:
            return Decision((), False, RunError(f"{broken}{told}"))
        first = broken.losses[0]
        return Decision((), False, failure_of(dataclasses.replace(first, cause=first.cause + told)))


def newest(positions: Dict[int, int]) -> Optional[int]:
    """The instance whose state the run goes on from, by the update that each survivor has; None if none has any."""
    trained = {index: update for index, update in positions.items() if update >= 0}
    return min(trained, key=lambda index: (-trained[index], index)) if trained else None


def receivers(positions: Dict[int, int], root: int, instances: int) -> List[int]:
    """Who lacks the state of instance `root`: replacements, and survivors that are behind."""
    return [index for index in range(instances) if positions.get(index, -1) != positions[root]]
