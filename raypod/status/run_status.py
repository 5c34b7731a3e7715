"""The state of a training run, folded from its events and heartbeats; the content of the status endpoint.

`RunStatus.handle` runs in the coordinator's thread, `snapshot` in any other one. What they share are references to
immutable objects and counters, so that no lock is needed: a snapshot may mix the values of two consecutive events.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pwd
import socket
import time
from typing import Any, Callable, Deque, Dict, List, Mapping, Optional

from raypod.events import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    Event,
    HostUsage,
    InstanceLost,
    InstanceStarted,
    PhaseBegun,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from raypod.fleet.base import Beat
from raypod.instance.control import IDLE
from raypod.plan.placement import InstanceSpec, specs_of
from raypod.plan.plan import Plan
from raypod.plan.tables import describe
from raypod.record.call_times import CallsByInstance
from raypod.record.event_log import event_name, fields_of
from raypod.record.event_text import RECENT
from raypod.record.recent_events import RecentEvents

VERSION = 1  # of the JSON: raised when the meaning of a key changes
_RECENT_EVENTS = 50
_RECENT_UPDATES = 512  # for sparklines
_NOT_SHOWN = ("stack", "instances", "seconds", "device_line")  # of an event: long, or elsewhere in the snapshot


class RunStatus:
    """The state of one run. See docs/reference/observability.md for the keys of `snapshot`."""

    def __init__(self, plan: Plan, heartbeats: Callable[[], Mapping[int, Beat]]) -> None:
        """`heartbeats` is `Fleet.heartbeats`."""
        self._plan, self._heartbeats = plan, heartbeats
        self._specs, self._sizes = plan.placement.instances, plan.placement.sizes
        self._description = describe(plan)
        self.calls = CallsByInstance()
        self.started_unix_s = time.time()
        self.phase, self.phase_began_s = "starting", time.monotonic()
        self.started: Optional[RunStarted] = None
        self.instances: Dict[int, InstanceStarted] = {}
        self.lost: Dict[int, InstanceLost] = {}
        self.update: Optional[UpdateDone] = None
        self.position = 0
        self.last_update_unix_s: Optional[float] = None
        self.updates_done = 0  # by this process
        self.restarts, self.generation = 0, 0
        self.repaired_unix_s: Optional[float] = None
        self.checkpoints_saved, self.checkpoints_failed = 0, 0
        self.checkpoint: Optional[Dict[str, Any]] = None
        self.evaluation: Optional[Dict[str, Any]] = None
        self.ended: Optional[RunEnded] = None
        self._recent = RecentEvents(_RECENT_EVENTS)
        self._losses: Deque[UpdateDone] = collections.deque(maxlen=_RECENT_UPDATES)

    def handle(self, event: Event) -> None:
        """Update the state from an event."""
        if isinstance(event, UpdateDone):
            self.update, self.position, self.last_update_unix_s = event, event.update, time.time()
            self.updates_done += 1
            self._losses.append(event)
            return
        self.calls.handle(event)
        if isinstance(event, PhaseBegun):
            self.phase, self.phase_began_s = event.phase, time.monotonic()
        elif event_name(type(event)) in RECENT:
            self._handle_logged(event)
            shown = {
                name: value
                for name, value in fields_of(event).items()
                if name not in _NOT_SHOWN or isinstance(value, float)
            }
            self._recent.append({"unix_s": time.time(), "event": event_name(type(event)), **shown})

    def _handle_logged(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started, self.position, self.generation = event, event.first_update, event.generation
            self.instances = {each.instance: each for each in event.instances}
        elif isinstance(event, Resized):
            self._sizes = dataclasses.replace(
                self._sizes, total_replicas=event.replicas, num_instances=len(event.hosts)
            )
            self._specs = specs_of(self._sizes, event.hosts)
            self.instances = {index: each for index, each in self.instances.items() if index < len(event.hosts)}
        elif isinstance(event, InstanceLost):
            self.lost = {**self.lost, event.instance: event}
        elif isinstance(event, Repaired):
            self.restarts, self.generation, self.position = event.restarts, event.generation, event.update
            self.instances = {each.instance: each for each in event.instances}
            self.lost, self.repaired_unix_s = {}, time.time()
            if self._plan.config.pod.is_elastic:
                self._drop_after(event.update)
        elif isinstance(event, CheckpointSaved):
            self.checkpoints_saved += 1
            self.checkpoint = {"update": event.update, "path": event.path, "unix_s": time.time()}
        elif isinstance(event, CheckpointFailed):
            self.checkpoints_failed += 1
        elif isinstance(event, EvaluationDone):
            self.evaluation = {"update": event.update, "epoch": event.epoch, "metrics": event.metrics}
            self.evaluation["unix_s"] = time.time()
        elif isinstance(event, RunEnded):
            self.ended = event

    def _drop_after(self, update: int) -> None:
        """Forget the metrics of later updates: they are computed again, with other bits."""
        while self._losses and self._losses[-1].update > update:
            self._losses.pop()
        self.update = self._losses[-1] if self._losses else None
        if self.evaluation is not None and self.evaluation["update"] > update:
            self.evaluation = None

    @property
    def samples_per_s(self) -> float:
        """The throughput of the last second of training, at least of the last call."""
        return self.update.samples_per_s if self.update is not None else 0.0

    @property
    def run_dir(self) -> str:
        """The run folder."""
        return self._plan.run_dir

    def snapshot(self) -> Dict[str, Any]:
        """Return the state as plain data."""
        return {
            **self.current(),
            "recent_updates": self._recent_updates(),
            "events": self._recent.records(),
            "plan": self._description,
        }

    def current(self) -> Dict[str, Any]:
        """Return the state without the newest updates, the events and the plan."""
        plan, update, started = self._plan, self.update, self.started
        beats = self._heartbeats()
        return {
            "version": VERSION,
            "kind": "training",
            "unix_s": time.time(),
            "started_unix_s": self.started_unix_s,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "user": user_name(),
            "run_dir": plan.run_dir,
            "task": plan.config.task.name,
            "device": started.device if started else None,
            "device_line": started.device_line if started else None,
            "phase": self.phase,
            "phase_s": time.monotonic() - self.phase_began_s,
            "update": self.position,
            "updates_done": self.updates_done,
            "samples_done": self.updates_done * plan.geometry.global_batch_size,
            "total_updates": plan.total_updates,
            "epoch": update.epoch if update else None,
            "epochs": plan.total_updates / plan.updates_per_epoch,
            "eta_s": None if self.update is None else self._plan.eta_s(self.position, self.samples_per_s),
            "metrics": update.metrics if update else {},
            "samples_are": plan.task.samples_are,
            "samples_per_s": self.samples_per_s,
            "part_rates": update.part_rates if update else {},
            "data_wait_share": update.data_wait_share if update else None,
            "last_update_unix_s": self.last_update_unix_s,
            "restarts": self.restarts,
            "repaired_unix_s": self.repaired_unix_s,
            "generation": self.generation,
            "checkpoints": {
                "saved": self.checkpoints_saved,
                "failed": self.checkpoints_failed,
                "last": self.checkpoint,
            },
            "last_evaluation": self.evaluation,
            "instances": self._instances(beats),
            "hosts": self._hosts(beats),
        }

    def _instances(self, beats: Mapping[int, Beat]) -> List[Dict[str, Any]]:
        summaries, now_s = self.calls.summaries(), time.monotonic()
        return [
            self._instance(spec, beats.get(spec.index), summaries.get(spec.index, {}), now_s) for spec in self._specs
        ]

    def _instance(
        self, spec: InstanceSpec, beat: Optional[Beat], calls: Mapping[str, Optional[float]], now_s: float
    ) -> Dict[str, Any]:
        instance, report = self.instances.get(spec.index), beat.report if beat else None
        sizes = self._sizes
        p50_s = calls.get("p50_s")
        return {
            "instance": spec.index,
            "host": instance.host if instance else spec.host,
            "pid": instance.pid if instance else None,
            "state": self._state_of(spec.index, report is not None),
            "replicas": [spec.replica_offset, spec.local_replicas],
            "ipus": [spec.index * sizes.local_ipus, sizes.local_ipus],
            "activity": report.activity if report else None,
            "activity_s": report.duration_s + (now_s - beat.received_s) if report and beat else None,
            "waits_for_others": report.waits_for_others if report else None,
            "calls": report.calls if report else 0,
            "cpu_s": report.cpu_s if report else None,
            "heartbeat_age_s": now_s - beat.received_s if beat else None,
            "samples_per_s": self._plan.geometry.samples_per_call / sizes.num_instances / p50_s if p50_s else None,
            "call_s": dict(calls),
            "log_file": self._plan.log_file(spec.index),
            "log_line": report.log_line if report else None,
        }

    def _state_of(self, index: int, has_heartbeat: bool) -> str:
        """Return "starting", "training", "lost", "idle" or the phase of the run that occupies the instance."""
        if self.ended is not None:
            return IDLE
        if index in self.lost:
            return "lost"
        if self.started is None and not has_heartbeat:
            return "starting"
        return self.phase

    def _hosts(self, beats: Mapping[int, Beat]) -> Dict[str, Optional[Dict[str, Any]]]:
        """Return the usage of each host, None if no instance there has reported it yet."""
        found: Dict[str, Optional[Dict[str, Any]]] = {}
        for spec in self._specs:
            instance = self.instances.get(spec.index)
            host, beat = instance.host if instance else spec.host, beats.get(spec.index)
            usage: Optional[HostUsage] = beat.report.host_usage if beat else None
            if usage is not None or host not in found:
                found[host] = dataclasses.asdict(usage) if usage is not None else None
        return found

    def _recent_updates(self) -> Dict[str, List[Any]]:
        """Return the numbers, the samples per second and each metric of the newest updates, oldest first."""
        updates = list(self._losses)
        columns: Dict[str, List[Any]] = {
            "update": [each.update for each in updates],
            "samples_per_s": [round(each.samples_per_s, 1) for each in updates],
        }
        for metric in self._plan.task.metrics:
            values = [each.metrics[metric.name] for each in updates]
            columns[metric.name] = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
        return columns


@functools.lru_cache(maxsize=None)
def user_name() -> str:
    """Return the name of the user of this process, or the user's number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name  # USER is unset in services and containers, and any program can set it
    except KeyError:
        return str(os.getuid())
