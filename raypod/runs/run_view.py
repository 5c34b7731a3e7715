"""The state of a run, folded from its events; `state.json`, `summary.json` and the status endpoint show it."""

from __future__ import annotations

import collections
import dataclasses
from typing import Deque, Dict, List, Optional, Sequence, Union

from raypod.events import (
    CheckpointFailed,
    CheckpointSaved,
    EvaluationDone,
    Event,
    InstanceLost,
    InstanceStarted,
    PhaseBegun,
    Repaired,
    Resized,
    RunEnded,
    RunStarted,
    StoppedEarly,
    UpdateDone,
)
from raypod.plan.placement import specs_of
from raypod.plan.plan import Plan
from raypod.runs.callback import Callback

_RECENT_UPDATES = 512  # for sparklines


class RunView(Callback):
    """The state of one run. After a change of the replicas, what was measured of abandoned weights is forgotten.

    Attributes:
        update: the newest measured one of this process.
        position: the number of finished updates, less than that of `update` after a rollback.
        updates_done, restarts: by this process.
        evaluations: all of the run, also those before it was resumed.
    """

    def __init__(self, plan: Plan, evaluations: Sequence[EvaluationDone] = ()) -> None:
        """`evaluations` holds those that a resumed run had made before."""
        self.plan = plan
        self.specs, self.sizes = plan.placement.instances, plan.placement.sizes
        self.phase = "starting"
        self.started: Optional[RunStarted] = None
        self.ended: Optional[RunEnded] = None
        self.stopped: Optional[StoppedEarly] = None
        self.instances: Dict[int, InstanceStarted] = {}
        self.lost: Dict[int, InstanceLost] = {}
        self.update: Optional[UpdateDone] = None
        self.recent: Deque[UpdateDone] = collections.deque(maxlen=_RECENT_UPDATES)
        self.position, self.updates_done = 0, 0
        self.restarts, self.generation = 0, 0
        self.checkpoints_saved, self.checkpoints_failed = 0, 0
        self.checkpoint: Optional[CheckpointSaved] = None
        self.evaluations: List[EvaluationDone] = list(evaluations)

    def on_event(self, event: Event) -> None:
        """Update the state from an event."""
        if isinstance(event, UpdateDone):
            self.update, self.position = event, event.update
            self.updates_done += 1
            self.recent.append(event)
        elif isinstance(event, PhaseBegun):
            self.phase = event.phase
        elif isinstance(event, (RunStarted, Resized, InstanceLost, Repaired)):
            self._handle_instances(event)
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event
            self.checkpoints_saved += 1
        elif isinstance(event, CheckpointFailed):
            self.checkpoints_failed += 1
        elif isinstance(event, EvaluationDone):
            self.evaluations = [*self.evaluations, event]
        elif isinstance(event, StoppedEarly):
            self.stopped = event
        elif isinstance(event, RunEnded):
            self.ended, self.position = event, event.updates

    def _handle_instances(self, event: Union[RunStarted, Resized, InstanceLost, Repaired]) -> None:
        if isinstance(event, RunStarted):
            self.started, self.position, self.generation = event, event.first_update, event.generation
            self.instances = {each.instance: each for each in event.instances}
        elif isinstance(event, Resized):
            self.sizes = dataclasses.replace(self.sizes, total_replicas=event.replicas, num_instances=len(event.hosts))
            self.specs = specs_of(self.sizes, event.hosts)
            self.instances = {index: each for index, each in self.instances.items() if index < len(event.hosts)}
        elif isinstance(event, InstanceLost):
            self.lost = {**self.lost, event.instance: event}
        else:
            self.restarts, self.generation, self.position = event.restarts, event.generation, event.update
            self.instances, self.lost = {each.instance: each for each in event.instances}, {}
            if self.plan.config.pod.is_elastic:
                self._drop_after(event.update)

    def _drop_after(self, update: int) -> None:
        """Forget the metrics of later updates: they are computed again, with other bits."""
        while self.recent and self.recent[-1].update > update:
            self.recent.pop()
        self.update = self.recent[-1] if self.recent else None
        self.evaluations = [each for each in self.evaluations if each.update <= update]
