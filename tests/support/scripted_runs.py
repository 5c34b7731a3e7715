"""Runs of scripted fleets, which lose instances where a test says so."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from raypod.events import CallReport, Event, InstanceLost, UpdateDone
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.fleet import Fleet, FleetBroken
from raypod.runtime.workers.scripted import ScriptedFleet


def events_of(plan: Plan, fleet: Fleet, **options: Any) -> List[Event]:
    """Run a plan; `options` are those of `coordinator.run`."""
    return list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), **options))


def of(events: Sequence[Event], kind: type) -> List[Any]:
    """Return the events of one type."""
    return [event for event in events if isinstance(event, kind)]


def only(events: Sequence[Event], kind: type) -> Any:
    """Return the only event of a type."""
    (found,) = of(events, kind)
    return found


def updates_of(events: Sequence[Event]) -> List[int]:
    """Return the updates in the order of their events."""
    return [event.update for event in of(events, UpdateDone)]


def lost(instance: int, kind: Any = "died", cause: str = "its process died", host: str = "") -> InstanceLost:
    """Return the loss of an instance, by default on the host h and its number."""
    return InstanceLost(instance, host or f"h{instance}", kind, cause, "in call 3", "", f"instance-{instance}.log")


def broken(*losses: InstanceLost) -> FleetBroken:
    """Return the failure of a fleet."""
    return FleetBroken(losses, "instance 0 has lost others: the barrier")


class Breaks(ScriptedFleet):
    """Breaks once before a report (update, instance), and once in each of some calls; `repairs` are their results."""

    def __init__(
        self,
        plan: Plan,
        before_report: Mapping[Tuple[int, int], FleetBroken] = {},
        in_call: Mapping[str, FleetBroken] = {},
        repairs: Sequence[Union[FleetBroken, Dict[int, int]]] = (),
    ) -> None:
        super().__init__(plan)
        self._before_report, self._in_call, self._repairs = dict(before_report), dict(in_call), list(repairs)
        self.repaired: List[Tuple[int, ...]] = []

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """See `Fleet.run`."""
        for report in super().run(segment, stop_requested):
            error = self._before_report.pop((report.first_update, report.instance), None)
            if error is not None:
                raise error
            yield report

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `Fleet.call`. Instance 0 reports a checkpoint once."""
        results = super().call(method, *arguments)
        error = self._in_call.pop(method, None)
        if error is None:
            return results
        self._saves = ()
        is_lost = any(loss.instance == 0 for loss in error.losses)
        raise FleetBroken(error.losses, error.cause, {} if is_lost else {0: results[0]})

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """See `Fleet.repair`."""
        self.repaired.append(lost)
        result = self._repairs.pop(0)
        if isinstance(result, FleetBroken):
            raise result
        return result
