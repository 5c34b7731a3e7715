"""What is done about a failure: pure policy. The coordinator tells what happened, and carries out the decision.

| what happened | emulated SDK | IPUs |
|---|---|---|
| an instance died, is silent or stuck | replaced; others go on with what their devices hold | replaced; note 1 |
| its program raised | replaced like a dead one; the same exception at the same update twice ends the run | the same |
| the instances lost each other, all alive | they meet anew | they meet anew |
| nobody is left who has trained | from the newest good checkpoint, else from the beginning | the same |
| Ray drains a host | its instances move, uncounted; with nowhere to go the run ends with a checkpoint | the same |
| a replacement's place | its old one; a spare host; any host | its old one; a spare host with free IPUs |
| more than `run.max_restarts` | the run fails with its first cause | the same |

Note 1: one dead instance ends the others' device run. All detach, go on from the newest weights that one of them has
read back, and attach.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Set, Tuple

from raypod.errors import RunError
from raypod.fleet import FleetBroken, failure_of

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
