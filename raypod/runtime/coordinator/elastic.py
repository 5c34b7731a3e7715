"""Elastic runs: continue with fewer replicas while hosts are lost, and with more when they return.

All instances are started again with the new sizes, from a checkpoint. Before that, a survivor writes the state that it
has, so that no update is lost. The samples of every update stay the same; `plan/elastic.py` chooses the sizes.
"""

from __future__ import annotations

import time
from typing import Iterator, List, Optional, Sequence, Set, Tuple, cast

from raypod.errors import ClusterError, ConfigError, HostLost, PodTooSmall, WaitTimedOut
from raypod.events import Event, InstanceStarted, InstanceWarned, PhaseBegun, Repaired, Resized
from raypod.plan.elastic import Room, largest_fit, sizes_of
from raypod.plan.plan import Plan
from raypod.runtime.coordinator.kept_state import KeptState
from raypod.runtime.coordinator.recovery import FailurePolicy, Resets, begin
from raypod.runtime.coordinator.same_data import COPY_FILES, check_same_data, code_of
from raypod.runtime.coordinator.stop import Stop
from raypod.runtime.workers.fleet import ElasticFleet, Fleet, FleetBroken, failure_of
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import restart_point


def start(full: Plan, fleet: Fleet) -> Tuple[Plan, List[InstanceStarted], str]:
    """Start all instances; in an elastic run on too few hosts, those of the largest plan that fits.

    Returns the plan, the reports of its instances, and which hosts are missing; "" if none is.

    Raises:
        PodTooSmall: too few hosts are there.
    """
    try:
        return full, fleet.start(), ""
    except PodTooSmall as missing:
        if not full.config.pod.is_elastic:
            raise
        elastic = cast(ElasticFleet, fleet)
        try:
            plan = largest_fit(full, elastic.wait_for_room(lambda room: True, lambda: True))
        except ConfigError as error:
            raise PodTooSmall(f"{missing}; {error}") from None
        try:
            return plan, elastic.resize(plan), str(missing)
        except FleetBroken as broken:  # a failed start is not repaired
            raise failure_of(broken.losses[0]) if broken.losses else broken from None


def resize_at_start(
    full: Plan, plan: Plan, missing: str, checkpoint: Optional[Checkpoint], hosts: Sequence[str]
) -> Optional[Resized]:
    """Return how the sizes at the start differ from those of the plan or of the checkpoint; None if they do not.

    Args:
        full: the plan of the run.
        plan: that of the instances that were started.
        missing: which hosts are missing; "" for none.
        checkpoint: from which the run resumes.
        hosts: of each instance.
    """
    planned, update = full.geometry.total_replicas, checkpoint.update if checkpoint else 0
    if missing or checkpoint is None:
        return resized(plan, planned, update, hosts, missing)
    before = checkpoint.manifest.geometry["total_replicas"]
    return resized(plan, before, update, hosts, f"resumed from {checkpoint.path.name}")


def resized(plan: Plan, before: int, update: int, hosts: Sequence[str], cause: str) -> Optional[Resized]:
    """Return the event for a plan that follows on one of `before` replicas; None if the number is the same."""
    sizes = sizes_of(plan)
    return None if sizes[0] == before else Resized(update, *sizes, before, tuple(hosts), cause)


class Elastic:
    """Changes the number of replicas of a run. `plan` is the current one."""

    def __init__(
        self,
        full: Plan,
        plan: Plan,
        fleet: ElasticFleet,
        kept: KeptState,
        policy: FailurePolicy,
        stop: Stop,
        resumed: Optional[Checkpoint],
    ) -> None:
        """`full` is the plan of all hosts; `resumed` is the checkpoint from which the run started."""
        self._full, self.plan = full, plan
        self._fleet, self._kept, self._metrics, self._schedule = fleet, kept, kept.metrics, kept.schedule
        self._policy, self._stop, self._resumed = policy, stop, resumed
        self._code = code_of(fleet.started()[0])  # the code with which the run began
        self._skipped: Set[str] = set()  # hosts with other files

    def shrink(self, gone: HostLost, began_s: float, resets: Resets) -> Iterator[Event]:
        """Continue on the hosts that are left, after `gone`: no host can replace it. `resets` are due there.

        Raises:
            HostLost: too few hosts are left.
            RunError: the policy ends the run, or no state could be saved.
        """
        with self._stop.saving():
            yield from self._kept.save()
        if self._schedule.last is None and self._schedule.failed is not None:
            raise self._schedule.not_saved(0.0)
        yield from self._resize_until_done(f"host {gone.host} is lost", began_s, gone, resets)

    def can_grow(self) -> bool:
        """Return whether hosts have returned, so that more replicas fit."""
        if sizes_of(self.plan) == sizes_of(self._full) or not self._has_more(self._fleet.room()):
            return False
        return self._has_more(self._fleet.wait_for_room(lambda room: True, lambda: True))

    def can_leave(self) -> bool:
        """Return whether the run can continue without the hosts that are being drained."""
        coordinator_stays = self._fleet.has_room_for((), False)
        return coordinator_stays and self._fit(self._fleet.room()) is not None

    def resize(self, cause: str) -> Iterator[Event]:
        """Continue on all hosts that respond, from the checkpoint that was written just before.

        Raises:
            HostLost, RunError: as `shrink`.
        """
        yield from self._resize_until_done(cause, time.monotonic(), None, Resets(self._full, self._fleet))

    def _has_more(self, room: List[Room]) -> bool:
        plan = self._fit(room)
        return plan is not None and sizes_of(plan)[0] > sizes_of(self.plan)[0]

    def _fit(self, room: List[Room]) -> Optional[Plan]:
        try:
            return self._largest_fit(room)
        except ConfigError:
            return None

    def _largest_fit(self, room: List[Room]) -> Plan:
        """Return the largest plan for the hosts that are not skipped. ConfigError if none fits."""
        usable = [each for each in room if each.host not in self._skipped]
        return largest_fit(self._full, usable, self._policy.uses_partition)

    def _resize_until_done(
        self, cause: str, began_s: float, gone: Optional[HostLost], resets: Resets
    ) -> Iterator[Event]:
        """Start the largest plan that fits, from the newest checkpoint; choose again if a host is lost meanwhile."""
        while True:
            plan, skipped = self._choose(gone), len(self._skipped)
            try:
                yield from self._resize(plan, cause, began_s, resets)
                if len(self._skipped) == skipped:
                    return
            except (FleetBroken, ClusterError, WaitTimedOut) as error:
                broken = error if isinstance(error, FleetBroken) else FleetBroken((), str(error))
                yield from broken.losses
                decision = self._policy.decide(broken, self._metrics.position, time.monotonic())
                if decision.error is not None:
                    raise decision.error from error
                resets.add(decision.resets)

    def _choose(self, gone: Optional[HostLost]) -> Plan:
        """Return the largest plan that fits.

        If a host is `gone`, wait until all replicas fit again, at most the time to wait for hosts.
        """

        def is_enough(room: List[Room]) -> bool:
            plan = self._fit(room)
            is_all = bool(self._skipped) or gone is None  # a skipped host does not return
            return is_all or (plan is not None and sizes_of(plan) == sizes_of(self._full))

        self._leave_if_noticed()
        room = self._fleet.wait_for_room(is_enough, lambda: self._stop.requested)
        self._leave_if_noticed()
        try:
            return self._largest_fit(room)
        except ConfigError as error:
            if self._stop.requested:
                self._stop.leave()
            hosts = self.plan.placement.instances
            lost = gone or HostLost(hosts[0].host, tuple(spec.index for spec in hosts), "", self.plan.log_file(0))
            raise HostLost(lost.host, lost.instances, f"{error}; restart hosts, then --resume", lost.logs) from None

    def _leave_if_noticed(self) -> None:
        """End the run: its state is saved, and there is no time to start the instances for a regular end."""
        if self._stop.must_leave:
            self._stop.leave()

    def _resize(self, plan: Plan, cause: str, began_s: float, resets: Resets) -> Iterator[Event]:
        yield PhaseBegun("repairing", self._metrics.position)
        checkpoint, damaged = restart_point(plan.run_dir, self._resumed)
        update = checkpoint.update if checkpoint else 0
        self._schedule.rollback_to(checkpoint)
        yield from self._kept.go_to(update)
        hosts = [spec.host for spec in plan.placement.instances]
        event = resized(plan, self.plan.geometry.total_replicas, update, hosts, cause)
        self.plan = plan
        self._metrics.resize(plan)
        if event is not None:
            self._schedule.add_resize(event)
            yield event
        self._kept.lose_all()
        self._kept.snapshots.close()  # with other replicas the updates have other bits
        started = self._fleet.resize(plan)
        different = [each for each in started if code_of(each) != self._code]
        if len(different) == len(started):  # an edit on a disk that all share
            different = []
        for each in different:
            if each.host not in self._skipped:
                self._skipped.add(each.host)
                text = f"host {each.host} is skipped: raypod's files or torch there differ from the run's; {COPY_FILES}"
                yield InstanceWarned(each.instance, text, self.plan.log_file(each.instance))
        if different:
            return
        check_same_data(plan, started, checkpoint)
        resets.run(is_resized=True)
        self._schedule.resize(plan, started[0])
        begin(plan, self._fleet, checkpoint)
        self._kept.lost = set()
        self._kept.snapshots.begin()
        self._schedule.use_new_writer(self._fleet)
        self._schedule.generation += 1
        source = "the beginning" if checkpoint is None else str(checkpoint.path)
        new, seconds = tuple(range(len(started))), time.monotonic() - began_s
        restarts, generation = self._policy.restarts, self._schedule.generation
        places = (new, tuple(hosts), source, update)
        yield Repaired(*places, seconds, restarts, generation, tuple(damaged), tuple(started), resets.hosts)
