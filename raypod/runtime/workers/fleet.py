"""The `Fleet` protocol, through which the coordinator runs instances, and the error of a fleet that lost some.

`InlineFleet` runs one instance in this process, `RayFleet` runs each in a Ray actor on its host, and `ScriptedFleet`
simulates them. The coordinator treats all alike.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from typing_extensions import Protocol

from raypod.errors import InstanceFailed, RunError
from raypod.events import CallReport, ClockReading, EvaluationReport, HeartbeatReport, InstanceLost, InstanceStarted
from raypod.plan.elastic import Room
from raypod.plan.plan import Plan, Segment
from raypod.training.checkpoint.transfer import Server

Labels = Tuple[Tuple[str, str], ...]


@dataclasses.dataclass(eq=False)
class FleetBroken(RunError):
    """An instance was lost, or instances lost their connections, and the others cannot continue. See `Fleet.repair`.

    `losses` holds the lost instances, the first cause first. It is empty if all instances are alive and only their
    connections failed, as `cause` describes. `results` holds what instances had returned to `Fleet.call` before.
    """

    losses: Tuple[InstanceLost, ...]
    cause: str
    results: Dict[int, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        if self.losses:
            return str(failure_of(self.losses[0]))
        return f"the instances have lost their connections to each other: {self.cause}"


class Beat(NamedTuple):
    """A heartbeat, and the monotonic time in seconds at which it was received."""

    report: HeartbeatReport
    received_s: float


class Family(Protocol):
    """A metric with its samples: `status.prometheus.Family`."""

    @property
    def name(self) -> str:
        """Its name, without a suffix."""

    @property
    def kind(self) -> str:
        """ "counter", "gauge" or "histogram"."""

    @property
    def help(self) -> str:
        """Its description."""

    @property
    def samples(self) -> Sequence[Tuple[Labels, Union[int, float], str]]:
        """(labels, value, suffix of the name) of each sample."""


def failure_of(loss: InstanceLost) -> InstanceFailed:
    """Return the error for a lost instance that is not replaced."""
    return InstanceFailed(loss.instance, loss.host, loss.cause, loss.log_file)


class Fleet(Protocol):
    """All instances of a run. All waits have a timeout, and all failures are raised as subclasses of RaypodError.

    `call` and `run` raise FleetBroken if instances are lost, in any state of the others: the survivors' calls have
    ended then, and every report that any instance had sent has been yielded.
    """

    start_seconds: List[Tuple[str, float]]  # the steps of `start` and their durations, in order

    def start(self) -> List[InstanceStarted]:
        """Start all instances and form their process group. Return their reports in instance order."""

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """Call a method of every instance in parallel; return the results in instance order."""

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """Run a segment in every instance; yield the reports of all instances as they arrive.

        Once `stop_requested()` returns true, all instances stop after the same call, as early as possible.
        """

    def abandon_loading(self) -> None:
        """Do not wait for the data of a call that no instance has begun, in a segment that is requested to stop.

        It is for the end of the run. Called in a signal handler of the main thread, which may be within `run`.
        """

    def evaluate(self, is_abandoned: Callable[[], bool]) -> Optional[List[EvaluationReport]]:
        """Evaluate the test split in all instances; return their reports in instance order.

        Once `is_abandoned()` returns true, all instances end the evaluation after their current call; returns None.
        """

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """Replace the instances `lost`, and form the process group again.

        A replacement starts on the host of its predecessor if that responds, else on a spare host of the cluster,
        else, with `may_share_hosts`, on any host. The survivors keep their processes. Return, for each survivor, the
        update of its state (-1 for none). A replacement has no state.

        Raises:
            FleetBroken: further instances were lost.
            RunError: no host is available for a replacement.
        """

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        """Make the survivors leave the process group. Return, for each, the update of the state kept (-1 for none).

        Raises:
            FleetBroken: further instances were lost.
        """

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        """Call a method of some instances in parallel, after `release`; return the results by instance.

        Raises:
            FleetBroken: one of them was lost.
        """

    def draining(self) -> List[str]:
        """Return the hosts of the run that are being drained. Cheap: it is called between any two reports."""

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        """Return whether there are hosts for these instances that are not being drained."""

    def hosts(self) -> List[str]:
        """Return the current host of each instance, in instance order."""

    def started(self) -> List[InstanceStarted]:
        """Return the report with which each current instance started, in instance order; [] before `start`."""

    def heartbeats(self) -> Dict[int, Beat]:
        """Return the newest heartbeat of each instance that has sent one. Cheap, and callable from any thread."""

    def export_metrics(self, collect: Callable[[], Iterable[Family]], constant: Labels) -> None:
        """Export metrics through the system that runs the instances, if it has an exporter, from `start` to `close`.

        Called before `start`. `collect` returns the current metrics, from any thread; `constant` labels are added.
        """

    def clocks(self) -> Dict[int, ClockReading]:
        """Return how the clock of each instance's host differs from this one's, of those that reply within a second.

        Callable during a segment, in the thread that runs it.
        """

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> Server:
        """Create an object of class `kind` in a process on the coordinator's host, for `call`s to use."""

    def peers(self) -> List[str]:
        """Return the other hosts of the cluster that are alive and not being drained, in its order from this one on.

        Callable from any thread between `start` and `close`.
        """

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> Server:
        """Create an object of class `kind` in a process on a host of `peers`, for this process to use.

        It does not wait for it: if the host is lost, requests raise OSError. Callable from any thread, as `peers`. The
        process is idle unless it handles a request, reserves nothing, and is not started again if it dies.
        """

    def close(self) -> None:
        """End every process, actor, placement group and session that `start` created. May be called repeatedly."""


class ElasticFleet(Fleet, Protocol):
    """A fleet that can continue with another plan after instances were lost that no host can replace.

    Attributes:
        must_leave: set by the coordinator: whether the process ends soon. Then `repair` waits for no replacement and
            raises HostLost, so that the survivors' state can be saved in time.
    """

    must_leave: Callable[[], bool]

    def room(self) -> List[Room]:
        """Return the hosts of the cluster that may respond, in its order. Cheap; a lost host may be among them."""

    def wait_for_room(self, is_enough: Callable[[List[Room]], bool], stop_requested: Callable[[], bool]) -> List[Room]:
        """Return the hosts of the cluster that respond, in its order.

        Waits until `is_enough` or `stop_requested` returns true, at most `pod.wait_hosts` seconds.
        """

    def resize(self, plan: Plan) -> List[InstanceStarted]:
        """End all instances and start those of a plan; return their reports. They have no state.

        It can be called again after an error.

        Raises:
            FleetBroken: an instance was lost.
            ClusterError, WaitTimedOut: a host is not available.
        """
