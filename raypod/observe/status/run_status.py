"""The state of a training run, folded from its events and heartbeats; the content of the status endpoint.

`RunStatus.on_event` runs in the coordinator's thread, `snapshot` in any other one. What they share are references to
immutable objects and counters, so that no lock is needed: a snapshot may mix the values of two consecutive events.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pwd
import socket
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from raypod.events import (
    CheckpointSaved,
    EvaluationDone,
    Event,
    HostUsage,
    PhaseBegun,
    Repaired,
    UpdateDone,
)
from raypod.plan.placement import InstanceSpec
from raypod.plan.plan import Plan
from raypod.plan.tables import describe
from raypod.runs.call_times import CallsByInstance
from raypod.runs.event_log import RecentEvents, event_name, fields_of
from raypod.runs.event_text import RECENT
from raypod.runs.run_view import RunView
from raypod.runtime.worker.control import IDLE
from raypod.runtime.workers.fleet import Beat

VERSION = 1  # of the JSON: raised when the meaning of a key changes
_RECENT_EVENTS = 50
_NOT_SHOWN = ("stack", "instances", "seconds", "device_line")  # of an event: long, or elsewhere in the snapshot


class RunStatus(RunView):
    """The state of one run, with times. See docs/reference/observability.md for the keys of `snapshot`."""

    def __init__(
        self, plan: Plan, heartbeats: Callable[[], Mapping[int, Beat]], evaluations: Sequence[EvaluationDone] = ()
    ) -> None:
        """`heartbeats` is `Fleet.heartbeats`; `evaluations` as of `RunView`."""
        super().__init__(plan, evaluations)
        self._heartbeats = heartbeats
        self._description = describe(plan)
        self.calls = CallsByInstance()
        self.started_unix_s = time.time()
        self.phase_began_s = time.monotonic()
        self.last_update_unix_s: Optional[float] = None
        self.repaired_unix_s: Optional[float] = None
        self._saved_unix_s = self._evaluated_unix_s = 0.0
        self._earlier = len(self.evaluations)
        self._recent = RecentEvents(_RECENT_EVENTS)

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, UpdateDone):
            self.last_update_unix_s = time.time()
            return
        self.calls.handle(event)
        if isinstance(event, PhaseBegun):
            self.phase_began_s = time.monotonic()
        elif event_name(type(event)) in RECENT:
            self._handle_logged(event, time.time())

    def _handle_logged(self, event: Event, now_s: float) -> None:
        if isinstance(event, Repaired):
            self.repaired_unix_s = now_s
        elif isinstance(event, CheckpointSaved):
            self._saved_unix_s = now_s
        elif isinstance(event, EvaluationDone):
            self._evaluated_unix_s = now_s
        fields = fields_of(event).items()
        shown = {name: value for name, value in fields if name not in _NOT_SHOWN or isinstance(value, float)}
        self._recent.append({"unix_s": now_s, "event": event_name(type(event)), **shown})

    @property
    def samples_per_s(self) -> float:
        """The throughput of the last second of training, at least of the last call."""
        return self.update.samples_per_s if self.update is not None else 0.0

    @property
    def run_dir(self) -> str:
        """The run folder."""
        return self.plan.run_dir

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
        plan, update, started = self.plan, self.update, self.started
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
            "eta_s": None if self.update is None else self.plan.eta_s(self.position, self.samples_per_s),
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
                "last": self._last_checkpoint(),
            },
            "last_evaluation": self._last_evaluation(),
            "instances": self._instances(beats),
            "hosts": self._hosts(beats),
        }

    def _last_checkpoint(self) -> Optional[Dict[str, Any]]:
        saved = self.checkpoint
        return None if saved is None else {"update": saved.update, "path": saved.path, "unix_s": self._saved_unix_s}

    def _last_evaluation(self) -> Optional[Dict[str, Any]]:
        """Return the newest evaluation of this process."""
        done = self.evaluations[self._earlier :][-1:]
        fields = [{"update": each.update, "epoch": each.epoch, "metrics": each.metrics} for each in done]
        return {**fields[0], "unix_s": self._evaluated_unix_s} if fields else None

    def _instances(self, beats: Mapping[int, Beat]) -> List[Dict[str, Any]]:
        summaries, now_s = self.calls.summaries(), time.monotonic()
        return [
            self._instance(spec, beats.get(spec.index), summaries.get(spec.index, {}), now_s) for spec in self.specs
        ]

    def _instance(
        self, spec: InstanceSpec, beat: Optional[Beat], calls: Mapping[str, Optional[float]], now_s: float
    ) -> Dict[str, Any]:
        instance, report = self.instances.get(spec.index), beat.report if beat else None
        sizes = self.sizes
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
            "samples_per_s": self.plan.geometry.samples_per_call / sizes.num_instances / p50_s if p50_s else None,
            "call_s": dict(calls),
            "log_file": self.plan.log_file(spec.index),
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
        for spec in self.specs:
            instance = self.instances.get(spec.index)
            host, beat = instance.host if instance else spec.host, beats.get(spec.index)
            usage: Optional[HostUsage] = beat.report.host_usage if beat else None
            if usage is not None or host not in found:
                found[host] = dataclasses.asdict(usage) if usage is not None else None
        return found

    def _recent_updates(self) -> Dict[str, List[Any]]:
        """Return the numbers, the samples per second and each metric of the newest updates, oldest first."""
        updates = list(self.recent)
        columns: Dict[str, List[Any]] = {
            "update": [each.update for each in updates],
            "samples_per_s": [round(each.samples_per_s, 1) for each in updates],
        }
        for metric in self.plan.task.metrics:
            values = [each.metrics[metric.name] for each in updates]
            columns[metric.name] = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
        return columns


@functools.lru_cache(maxsize=None)
def user_name(uid: Optional[int] = None) -> str:
    """Return the name of a user, by default that of this process; the number of one that has no name."""
    uid = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name  # USER is unset in services and containers, and any program can set it
    except KeyError:
        return str(uid)
