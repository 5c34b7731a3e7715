"""A simulated fleet without computation, for tests and benchmarks of the coordinator with many instances."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from raypod.events import CallReport, ClockReading, EvaluationReport, InstanceStarted, SaveReport
from raypod.plan.plan import Plan, Segment
from raypod.runtime.worker.seeding import Endpoint
from raypod.runtime.workers.fleet import Beat, Family, Labels
from raypod.training.checkpoint.transfer import Server

_WEIGHTS_SHA256 = "0" * 64


class ScriptedFleet:
    """A fleet in which every instance reports every call. See `Fleet`."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._instances = plan, range(plan.geometry.num_instances)
        self.start_seconds: List[Tuple[str, float]] = []
        self.called: List[str] = []  # method names, in order
        self._saves: Tuple[SaveReport, ...] = ()

    def start(self) -> List[InstanceStarted]:
        return self.started()

    def started(self) -> List[InstanceStarted]:
        hosts = self.hosts()
        return [InstanceStarted(index, hosts[index], 0, "emulated", "scripted", 1, ()) for index in self._instances]

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `Fleet.call`. Methods without a script return None."""
        self.called.append(method)
        if method == "save":
            update = arguments[0].update
            self._saves = (SaveReport(update, f"update-{update}", _WEIGHTS_SHA256, None),)
        scripts: Dict[str, Callable[[int], Any]] = {
            "open_seeding": lambda index: Endpoint(index, self._plan.placement.instances[index].host, "127.0.0.1", 0),
            "seed_weights": lambda index: _WEIGHTS_SHA256,
            "has_file": lambda index: True,
            "load_checkpoint": lambda index: True,
            "evaluate": lambda index: EvaluationReport(index, 1, ((0.5,), (1.0,)) * len(self._plan.task.metrics)),
            "finish_saves": lambda index: self._saves if index == 0 else (),
        }
        script = scripts.get(method)
        return [script(index) if script else None for index in self._instances]

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for update in range(segment.first_update, segment.end, self._plan.geometry.device_iterations):
            if stop_requested():
                return
            yield from self.reports(update)

    def reports(self, update: int) -> List[CallReport]:
        """Return the reports of the call that begins with `update` (0-based)."""
        return [self._report(instance, update) for instance in self._instances]

    def abandon_loading(self) -> None:
        """See `Fleet.abandon_loading`."""

    def evaluate(self, is_abandoned: Callable[[], bool]) -> Optional[List[EvaluationReport]]:
        return None if is_abandoned() else self.call("evaluate")

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """See `Fleet.repair`. Subclasses that lose instances override it."""
        raise AssertionError("this fleet loses no instances")

    def release(self, survivors: Sequence[int]) -> Dict[int, int]:
        """See `Fleet.release`. Subclasses whose instances keep a state override it."""
        return dict.fromkeys(survivors, -1)

    def call_on(self, instances: Sequence[int], method: str, *arguments: Any) -> Dict[int, Any]:
        """See `Fleet.call_on`. Subclasses whose instances keep a state override it."""
        raise AssertionError("these instances keep no state")

    def draining(self) -> List[str]:
        return []

    def has_room_for(self, instances: Tuple[int, ...], may_share_hosts: bool) -> bool:
        return False

    def export_metrics(self, collect: Callable[[], Iterable[Family]], constant: Labels) -> None:
        """See `Fleet.export_metrics`. There is no exporter."""

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> Server:
        """See `Fleet.serve`. Subclasses whose instances share no disk with this host override it."""
        raise AssertionError("this fleet has the disk of the coordinator's host")

    def peers(self) -> List[str]:
        """See `Fleet.peers`. Subclasses with other hosts override it."""
        return []

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> Server:
        """See `Fleet.serve_on`. Subclasses with other hosts override it."""
        raise AssertionError("this fleet has no other hosts")

    def hosts(self) -> List[str]:
        return [spec.host for spec in self._plan.placement.instances]

    def heartbeats(self) -> Dict[int, Beat]:
        """See `Fleet.heartbeats`. The instances are simulated and have none."""
        return {}

    def clocks(self) -> Dict[int, ClockReading]:
        """See `Fleet.clocks`. This is one process."""
        return {index: ClockReading(0.0, 0.0) for index in self._instances}

    def close(self) -> None:
        """See `Fleet.close`."""

    def _report(self, instance: int, update: int) -> CallReport:
        replicas, iterations = self._plan.geometry.local_replicas, self._plan.geometry.device_iterations
        of_replica = (1.0 / (1 + instance), 1.0) * len(self._plan.task.metrics)
        return CallReport(instance, update, ((of_replica,) * replicas,) * iterations)
