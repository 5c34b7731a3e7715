"""The resets of devices that the SDK requires after a failure, by the command of the user (`run.reset_command`)."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Tuple

from raypod.events import InstanceLost
from raypod.fleet.base import Fleet, failure_of
from raypod.plan.plan import Plan

_OF_PARTITION = ("LINK_RESET", "PARTITION_RESET")  # one host makes it for all
_OF_HOST = ("IPU_RESET", "FULL_RESET")


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
