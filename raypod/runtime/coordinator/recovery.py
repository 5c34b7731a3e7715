"""Recovery from failures: which instances are replaced, and from which state the run continues.

The result of a run does not depend on where its replicas run, so every survivor keeps what it has computed, and the
weights are those of a run without a failure.

| what happened | emulated SDK | IPUs |
|---|---|---|
| an instance `died`, is `silent` or `stuck` | replace it; the others keep their state | same; see note 1 |
| its program `raised` before the first complete call | end the run: a replacement would raise the same | same |
| it `raised` later | replace it; the same exception at the same update a second time ends the run; see note 4 | same |
| its `device` failed in a call | only by EMULATED_POD_DEVICE_FAULT | replace it, or end the run; see note 5 |
| the instances lost their connections, all alive | form the process group again | same |
| no instance has a state | continue from the newest snapshot or valid checkpoint, or from the beginning | same |
| no host can replace it, with `--elastic` | continue with fewer replicas (elastic.py) | same |
| Ray drains a host | move its instances (not counted); if that is impossible, save a checkpoint and end | same |
| place of a replacement | same host; a spare host; any host (see note 3) | same host; a spare host with free IPUs |
| a failure after `run.max_restarts` restarts | end the run with an exception; see note 2 | same |

Note 1: the loss of one instance ends the device runs of the others. Those in a call have a failed `device`. The others
detach, continue from the newest weights that one of them has read back, and attach again. One that cannot release its
devices `raised`.

Note 2: InstanceFailed for the first lost instance of that failure; RunError if only the connections failed. The message
also quotes the first failure since the restarts were last refilled (REFILL_S).

Note 3: not with `--elastic`, where an instance shares its host only with those that the plan puts there.

Note 4: an instance that raised is alive. If no other one has the state, it is saved before the replacement
(kept_state.py), and so is the newest state of any instance before the run ends.

Note 5: the state of the device is unknown, so the instance is treated as lost, unlike one that was not in a call and
can release its device. Without a survivor the run continues from the newest snapshot (kept_state.py), or from a newer
checkpoint. The recovery action of the SDK decides: none, or IPU_RESET: replace its process, which resets
the IPUs as it loads its program (documented for Graphcore's other runtimes, inferred for PopTorch). FULL_RESET and an
UnrecoverableError end the run with the reason. With `run.reset_command` every reset is that command: it runs on the
hosts of the failed devices once all instances have released theirs and the processes of lost ones have ended.

The words in backticks in the first column are values of `events.FailureKind`.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from typing_extensions import Protocol

from raypod.errors import CheckpointDamaged, HostLost, RunError, WeightsDiffer
from raypod.events import Event, InstanceLost, PhaseBegun, Repaired
from raypod.plan.plan import Plan
from raypod.runtime.coordinator.checkpoint_schedule import load_on
from raypod.runtime.coordinator.kept_state import KeptState, newest
from raypod.runtime.coordinator.same_data import check_same_data
from raypod.runtime.worker.seeding import new_seeding
from raypod.runtime.workers.fleet import Fleet, FleetBroken, failure_of
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import restart_point

REFILL_S = 3600.0  # without a failure; afterwards all restarts are available again
# Recovery actions that raypod cannot execute: PopTorch's guide requires a power cycle, and to take the system out of
# operation.
_GIVE_UP = {
    "FULL_RESET": "the SDK requires FULL_RESET: power-cycle the system of this host, then the same command continues; "
    "or have --reset-command do it",
    "UNRECOVERABLE": "the SDK calls it unrecoverable: take this host out of the cluster file and have it repaired, "
    "then the same command continues",
}
_MAY_SHARE_HOSTS = {"emulated": True, "ipu": False}  # whether a replacement may run on an occupied host, by device
_OF_PARTITION = ("LINK_RESET", "PARTITION_RESET")  # one host makes it for all
_OF_HOST = ("IPU_RESET", "FULL_RESET")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Replace these instances, and reset the devices of those of `resets`; or end the run with `error`."""

    replace: Tuple[int, ...]
    may_share_hosts: bool
    error: Optional[RunError] = None
    resets: Tuple[InstanceLost, ...] = ()  # one for each reset command


class FailurePolicy:
    """Decides what to do about each failure of a run. Performs no I/O."""

    def __init__(self, device: str, max_restarts: int, is_elastic: bool = False, can_reset: bool = False) -> None:
        """`can_reset`: the user has configured a reset command."""
        self._can_reset = can_reset
        self.may_share_hosts = _MAY_SHARE_HOSTS[device] and not is_elastic
        self.uses_partition = not _MAY_SHARE_HOSTS[device]  # a V-IPU partition, if the cluster file has one
        self._max_restarts = self._remaining = max_restarts
        self._last_s: Optional[float] = None
        self._first_failure = ""
        self._raised: Set[Tuple[str, int]] = set()  # cause and update of each exception
        self.restarts = 0

    def decide(self, broken: FleetBroken, update: int, now_s: float) -> Decision:
        """Decide about instances that were lost after `update` updates. `now_s` is a monotonic time in seconds."""
        if self._last_s is not None and now_s - self._last_s >= REFILL_S:
            self._remaining, self._first_failure = self._max_restarts, ""
        self._last_s = now_s
        resets = resets_for(broken.losses) if self._can_reset else ()
        reset = [loss.recovery_action for loss in resets]
        given_up = next((loss for loss in broken.losses if loss.recovery_action in set(_GIVE_UP) - set(reset)), None)
        if given_up is not None:
            return self._end_run(FleetBroken((given_up,), broken.cause), _GIVE_UP[given_up.recovery_action])
        repeated = self._repeated(broken, update)
        if repeated is not None:
            return self._end_run(repeated, f"the same happened at update {update} before")
        if not self._remaining:
            return self._end_run(broken, self._no_restarts_left(broken))
        self._remaining -= 1
        self.restarts += 1
        self._first_failure = self._first_failure or str(broken)
        lost = tuple(sorted({loss.instance for loss in broken.losses}))
        return Decision(lost, self.may_share_hosts, resets=resets)

    def _repeated(self, broken: FleetBroken, update: int) -> Optional[FleetBroken]:
        """Return the exceptions that were raised at the same update before: a restart would raise them again."""
        raised = [loss for loss in broken.losses if loss.kind == "raised"]
        again = [loss for loss in raised if (loss.cause, update) in self._raised]
        self._raised.update((loss.cause, update) for loss in raised)
        return FleetBroken(tuple(again), broken.cause) if again else None

    def _no_restarts_left(self, broken: FleetBroken) -> str:
        if not self._max_restarts:
            return ""
        is_same = str(broken) == self._first_failure
        required = next((loss.recovery_action for loss in broken.losses if loss.recovery_action), "")
        hint = f"; the SDK requires {required}: --reset-command executes it" if required and not self._can_reset else ""
        first = "had the same cause" if is_same else f"was: {self._first_failure}"
        return (
            f"not repaired: the limit --max-restarts {self._max_restarts} is reached; the first failure {first}{hint}"
        )

    def _end_run(self, broken: FleetBroken, reason: str) -> Decision:
        suffix = f" ({reason})" if reason else ""
        if not broken.losses:
            return Decision((), False, RunError(f"{broken}{suffix}"))
        first = broken.losses[0]
        return Decision((), False, failure_of(dataclasses.replace(first, cause=first.cause + suffix)))


class Shrinking(Protocol):
    """Continues a run with fewer replicas: `elastic.Elastic`."""

    def shrink(self, gone: HostLost, began_s: float, resets: Resets) -> Iterator[Event]:
        """Continue after `gone`: no host can replace it. `resets` are due."""


class Recovery:
    """Runs parts of a run, and repairs the fleet if they raise FleetBroken."""

    def __init__(
        self,
        plan: Plan,
        fleet: Fleet,
        kept: KeptState,
        policy: FailurePolicy,
        resumed: Optional[Checkpoint],
        elastic: Optional[Shrinking] = None,
    ) -> None:
        self._plan, self._fleet, self._kept = plan, fleet, kept
        self._metrics, self._schedule = kept.metrics, kept.schedule
        self._resumed, self._policy, self._elastic = resumed, policy, elastic

    def once(self, action: Iterator[Event]) -> Iterator[Event]:
        """Yield the events of `action`; if the fleet breaks, repair it and drop the rest of the action.

        Raises:
            RunError: the policy ends the run.
        """
        try:
            yield from action
        except FleetBroken as broken:
            yield from self._repair(broken, set())

    def until_done(self, update: int, begin: Callable[[], Iterator[Event]]) -> Iterator[Event]:
        """Run an action that is due after `update` updates; retry it after each repair.

        It is not retried if a repair has rolled the run back to another update.
        """
        while self._metrics.position == update:
            try:
                yield from begin()
            except FleetBroken as broken:
                yield from self._repair(broken, set())
            else:
                return

    def move_away_from(self, hosts: Sequence[str]) -> Iterator[Event]:
        """Move the instances on `hosts`, which are being drained, to other hosts. Their state is not lost."""
        moving = set(self._instances_on(hosts))
        if not moving:  # a repair has moved them meanwhile
            return
        try:
            yield from self._replace(tuple(sorted(moving)), moving, self._policy.may_share_hosts, time.monotonic())
        except FleetBroken as broken:
            yield from self._repair(broken, moving)
        except HostLost as gone:
            yield from self._shrink(gone, time.monotonic(), Resets(self._plan, self._fleet))

    def can_move_away_from(self, hosts: Sequence[str]) -> bool:
        """Return whether other hosts have room for the instances on `hosts`, and other instances have the state."""
        moving = self._instances_on(hosts)
        if len(moving) == len(self._fleet.hosts()):
            return False
        return self._fleet.has_room_for(moving, self._policy.may_share_hosts)

    def _instances_on(self, hosts: Sequence[str]) -> Tuple[int, ...]:
        return tuple(index for index, host in enumerate(self._fleet.hosts()) if host in hosts)

    def _repair(self, broken: FleetBroken, replaced: Set[int]) -> Iterator[Event]:
        """Replace the lost instances; repeat if that loses further ones.

        `replaced` holds the instances that an interrupted replacement has replaced already.
        """
        began_s, resets = time.monotonic(), Resets(self._plan, self._fleet)
        while True:
            if self._metrics.last is None and broken.losses and broken.losses[0].kind == "raised":
                raise failure_of(broken.losses[0]) from broken
            yield from broken.losses
            raised = {loss.instance for loss in broken.losses if loss.kind == "raised"}  # alive, with their state
            self._kept.lost |= {loss.instance for loss in broken.losses} - raised
            decision = self._policy.decide(broken, self._metrics.position, time.monotonic())
            if decision.error is not None:
                raise decision.error from broken
            resets.add(decision.resets)
            replaced = replaced | set(decision.replace)
            if raised and len(replaced) == len(self._fleet.hosts()):
                yield from self._kept.try_to_save()
            try:
                yield from self._replace(decision.replace, replaced, decision.may_share_hosts, began_s, resets)
                return
            except FleetBroken as again:
                broken = again
            except HostLost as gone:
                yield from self._shrink(gone, began_s, resets)
                return

    def _shrink(self, gone: HostLost, began_s: float, resets: Resets) -> Iterator[Event]:
        if self._elastic is None:
            raise gone
        yield from self._elastic.shrink(gone, began_s, resets)

    def _replace(
        self,
        lost: Tuple[int, ...],
        replaced: Set[int],
        may_share_hosts: bool,
        began_s: float,
        resets: Optional[Resets] = None,
    ) -> Iterator[Event]:
        """Replace `lost` and restore the state. `replaced` holds all replacements since training was interrupted."""
        yield PhaseBegun("repairing", self._metrics.position)
        self._kept.lost |= replaced
        positions = self._fleet.repair(lost, may_share_hosts)
        self._check_replacements(replaced)
        if resets is not None:
            resets.run()
        self._recover_reports(positions)
        source, update, damaged = self._restore_state(positions)
        self._kept.lost = set()
        self._kept.snapshots.begin()
        if 0 in replaced:
            self._schedule.use_new_writer(self._fleet)
        yield from self._kept.go_to(update)
        self._schedule.generation += 1
        hosts, new = self._fleet.hosts(), tuple(sorted(replaced))
        new_hosts = tuple(hosts[index] for index in new)
        seconds = time.monotonic() - began_s
        restarts, generation = self._policy.restarts, self._schedule.generation
        started = tuple(self._fleet.started())
        reset = resets.hosts if resets is not None else ()
        yield Repaired(new, new_hosts, source, update, seconds, restarts, generation, damaged, started, reset)

    def _check_replacements(self, replaced: Set[int]) -> None:
        """Raise ConfigError, which names the host, if a replacement has other files of raypod, or another data set."""
        hosts = self._fleet.hosts()
        started = [dataclasses.replace(each, host=hosts[each.instance]) for each in self._fleet.started()]
        check_same_data(self._plan, sorted(started, key=lambda each: each.instance in replaced))

    def _recover_reports(self, positions: Dict[int, int]) -> None:
        """Fetch the reports that lost instances did not send, from the survivors, before they load another state."""
        missing = self._metrics.missing_reports(max(positions.values(), default=-1))
        for reports in self._fleet.call("lost_reports", missing) if missing else ():
            self._metrics.add_lost_reports(reports or ())

    def _restore_state(self, positions: Dict[int, int]) -> Tuple[str, int, Tuple[str, ...]]:
        """Give all instances the newest state; return its source, its update, and messages about damaged checkpoints.

        `positions` holds the update of each survivor's state, -1 for none.
        """
        root = newest(positions)
        snapshot = self._kept.newest_snapshot(-1 if root is None else positions[root])
        if snapshot is not None:
            self._fleet.call("load_snapshot", snapshot.root, snapshot.place, snapshot.update)
            seed(self._fleet, None, snapshot.root)
            return f"the snapshot of host {snapshot.host}", snapshot.update, ()
        if root is not None:
            seed(self._fleet, None, root, receivers(positions, root, len(self._fleet.hosts())))
            return f"instance {root}", positions[root], ()
        checkpoint, damaged = restart_point(self._plan.run_dir, self._resumed)
        begin(self._plan, self._fleet, checkpoint)
        self._schedule.rollback_to(checkpoint)
        if checkpoint is None:
            return "the beginning", 0, tuple(damaged)
        return str(checkpoint.path), checkpoint.update, tuple(damaged)


def begin(plan: Plan, fleet: Fleet, checkpoint: Optional[Checkpoint]) -> None:
    """Give all instances the state of a checkpoint; without one, the state in which a run begins.

    Raises:
        ConfigError: the file of `--init-weights` cannot be used.
        WeightsDiffer, CheckpointDamaged: as `seed`.
    """
    if checkpoint is None and plan.config.training.init_weights is not None:
        fleet.call("load_initial_weights")
    seed(fleet, checkpoint)


def seed(
    fleet: Fleet, checkpoint: Optional[Checkpoint], root: int = 0, receivers: Optional[Sequence[int]] = None
) -> None:
    """Broadcast the state of instance `root`, or of a checkpoint that it loads, to `receivers` (default: all others).

    Raises:
        WeightsDiffer: the hashes of the instances' weights differ.
        CheckpointDamaged: the hash of the checkpoint's weights differs from its manifest.
    """
    if checkpoint is not None:
        load_on(fleet, root, checkpoint)
    seeding = new_seeding(fleet.call("open_seeding"), root, receivers)
    hashes = fleet.call("seed_weights", seeding)
    if len(set(hashes)) > 1:
        raise WeightsDiffer(dict(enumerate(hashes)))
    if checkpoint is not None and hashes[0] != checkpoint.manifest.weights_sha256:
        raise CheckpointDamaged(str(checkpoint.path), "the hash of its weights differs from the one in its manifest")


def receivers(positions: Dict[int, int], root: int, instances: int) -> List[int]:
    """Return the instances without the state of `root`: replacements, and survivors with an older state."""
    return [index for index in range(instances) if positions.get(index, -1) != positions[root]]


def resets_for(losses: Sequence[InstanceLost]) -> Tuple[InstanceLost, ...]:
    """Return those of `losses` whose recovery action is executed: the first of each host, or of the partition.

    A FULL_RESET of a host takes precedence over the reset of a partition, and both over those of single IPUs.
    """
    full = [loss for loss in losses if loss.recovery_action == "FULL_RESET"]
    of_partition = [loss for loss in losses if loss.recovery_action in _OF_PARTITION]
    if of_partition and not full:
        return tuple(of_partition[:1])
    of_hosts = [loss for loss in losses if loss.recovery_action in _OF_HOST]
    first = {loss.host: loss for loss in reversed([*full, *of_hosts])}
    return tuple(sorted(first.values(), key=lambda loss: loss.instance))


class Resets:
    """The resets of one repair, which are due until they have been made."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self._command, self._timeout_s = plan.config.run.reset_command, plan.config.run.reset_timeout_s
        self._fleet = fleet
        self._due: List[InstanceLost] = []
        self.hosts: Tuple[str, ...] = ()  # on which the command has been executed

    def add(self, losses: Sequence[InstanceLost]) -> None:
        """Add the resets for `losses`."""
        self._due = [*self._due, *losses]

    def run(self, is_resized: bool = False) -> None:
        """Execute the command in the replacement of each failed instance, while no instance has a device.

        `is_resized`: the instances have other numbers now, and those of a host that is left need no reset.

        Raises:
            InstanceFailed: the command has failed.
            FleetBroken: an instance was lost meanwhile; the reset is still due.
        """
        while self._due and self._command is not None:
            loss = self._due[0]
            instance = self._instance_for(loss) if is_resized else loss.instance
            if instance is not None:
                self._reset(loss, instance, self._command)
            del self._due[0]

    def _instance_for(self, loss: InstanceLost) -> Optional[int]:
        """Return an instance on the host of a lost one; any for a partition, None if the host has no instance."""
        hosts = self._fleet.hosts()
        if loss.host in hosts:
            return hosts.index(loss.host)
        return 0 if loss.recovery_action in _OF_PARTITION else None

    def _reset(self, loss: InstanceLost, instance: int, command: str) -> None:
        arguments = (command, loss.recovery_action, self._timeout_s)
        reason = self._fleet.call_on((instance,), "reset_devices", *arguments)[instance]
        host = self._fleet.hosts()[instance]
        if reason:
            cause = f"{loss.cause}; the reset command {command!r} on host {host} has failed: {reason}"
            raise failure_of(dataclasses.replace(loss, cause=cause))
        self.hosts = (*self.hosts, host)
