"""`raypod.Trainable`: a training run as a trial of Ray Tune."""

from __future__ import annotations

import collections
import shutil
from pathlib import Path
from typing import Any, Deque, Dict, List, Mapping, Optional

import ray

from raypod.api.fit import Stream, plan_of, stream
from raypod.events import CheckpointSaved, EvaluationDone, Event, UpdateDone
from raypod.plan.plan import Plan
from raypod.runtime.workers.ray_nodes import alive_nodes
from raypod.training.checkpoint import resume, storage

try:
    from ray import tune
except ImportError as missing:
    raise ImportError(f"raypod.Trainable needs Ray Tune: pip install 'raypod[tune]' ({missing})") from missing

_ARGUMENTS = ("task", "config", "cluster")
_FOLDER = "raypod"  # in a trial's folder: the run folder; in a checkpoint of Tune: the checkpoint


class Trainable(tune.Trainable):  # type: ignore[misc]  # Ray has no types here
    """A training for `ray.tune.Tuner`; `param_space` holds arguments of `raypod.fit`, as in
    `{"learning_rate": tune.grid_search([0.1, 0.01]), "updates": 100}`.

    It reports after each evaluation of the test split: `update`, `epoch`, the metrics of that update (`loss`, ...) and
    those of the test split (`test_loss`, ...). Without `config` and `evaluate_every`, that is after each epoch. Its
    checkpoints are those of raypod. The run folder is `raypod` in the folder of the trial.

    A trial reserves one CPU per instance (and the IPUs, if the hosts have any) in its placement group, in which the
    instances run: nothing else is reserved, so that trials cannot block each other.
    """

    @classmethod
    def default_resource_request(cls, config: Dict[str, Any]) -> Any:
        """Return the bundles of a trial: one per host."""
        plan = _plan_of(config)
        nodes = [node["Resources"] for node in alive_nodes(ray)]
        cpus = max((node.get("CPU", 1.0) for node in nodes), default=1.0)
        bundles: List[Dict[str, float]] = []
        for index, host in enumerate(plan.placement.hosts):
            bundle = {"CPU": min(cpus, float(len(plan.placement.instances_on(index))))}
            if not plan.placement.cluster.is_local:
                bundle[f"node:{host.address}"] = 0.001
            if any("IPU" in node for node in nodes):
                bundle["IPU"] = float(plan.placement.ipus_on(index))
            bundles.append(bundle)
        # Under Ray, the coordinator, which waits most of the time, is the process of the trial itself.
        head: List[Dict[str, float]] = [] if plan.is_inline else [{}]
        strategy = "STRICT_PACK" if plan.placement.cluster.is_local else "PACK"
        return tune.PlacementGroupFactory([*head, *bundles], strategy=strategy)

    def setup(self, config: Dict[str, Any]) -> None:
        """Check the arguments. The run starts with the first step."""
        self._arguments = _arguments_of(config)
        self._runs = 0
        self._begin()

    def step(self) -> Dict[str, Any]:
        """Train until the next evaluation; return its metrics."""
        while True:
            event = self._next()
            if event is None:
                return {**self._measured, "done": True}
            if isinstance(event, UpdateDone):
                self._measured.update(update=event.update, epoch=event.epoch, **event.metrics)
            elif isinstance(event, EvaluationDone) and event.update > self._restored_update:
                self._measured.update(update=event.update, epoch=event.epoch)
                self._measured.update({f"test_{name}": value for name, value in event.metrics.items()})
                is_last = event.update >= self._stream.total_updates
                if is_last:
                    self._stream.result()
                return {**self._measured, "done": is_last}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the checkpoint of the last reported update; train on until it is written."""
        update = self._measured.get("update", 0)
        while self._saved is None or self._saved.update < update:
            event = self._take()
            if event is None:
                break
            self._pending.append(event)
        if self._saved is not None:
            shutil.copytree(self._saved.path, str(Path(checkpoint_dir, _FOLDER)))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from a checkpoint of `save_checkpoint`; the arguments of this trial may differ from its own."""
        self._stream.close()
        self._begin(Path(checkpoint_dir, _FOLDER))

    def cleanup(self) -> None:
        """End the run, with a checkpoint."""
        self._stream.close()

    def _begin(self, checkpoint: Optional[Path] = None) -> None:
        arguments = dict(self._arguments)
        self._runs += 1
        suffix = f"-{self._runs}" if self._runs > 1 else ""
        arguments.setdefault("run_dir", f"{self.logdir}/{_FOLDER}{suffix}")
        if checkpoint is not None:
            plan = _plan_of(self._arguments)
            saved = storage.read_manifest(checkpoint).manifest.settings
            now = resume.settings_of(plan)
            changed = [name for name in saved if saved[name] != now.get(name, saved[name])]
            arguments.update(resume=str(checkpoint), resume_anyway=",".join(changed) or None)
        self._stream: Stream = stream(progress=False, **arguments)
        self._pending: Deque[Event] = collections.deque()
        self._saved: Optional[CheckpointSaved] = None
        self._measured: Dict[str, Any] = {}
        # The evaluation of that update was reported before; a resumed run repeats it.
        self._restored_update = 0 if checkpoint is None else storage.read_manifest(checkpoint).update

    def _next(self) -> Optional[Event]:
        """Return the next event, those first that `save_checkpoint` has taken; None at the end."""
        return self._pending.popleft() if self._pending else self._take()

    def _take(self) -> Optional[Event]:
        event = next(self._stream, None)
        if isinstance(event, CheckpointSaved):
            self._saved = event
        return event


def _arguments_of(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments of a trial, with an evaluation after each epoch unless they say otherwise."""
    if config.get("config") is not None:
        return dict(config)
    return {"evaluate_every": 1, **config}


def _plan_of(config: Mapping[str, Any]) -> Plan:
    flags = {name: value for name, value in _arguments_of(config).items() if name not in _ARGUMENTS}
    return plan_of(config.get("task"), config.get("config"), config.get("cluster"), flags, is_dry=True)
