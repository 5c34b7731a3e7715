"""MLflow: a run of the experiment `raypod`, or of the one that MLFLOW_EXPERIMENT_NAME names.

MLFLOW_TRACKING_URI selects the server or the store; without it MLflow uses its default in the current folder.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.observe.trackers.tracker import FAILED, FINISHED, Point, RunFacts, Steps

_BATCH = 1000  # the server's limit of metrics per request; that of parameters is 100
_PARAMETERS = 100
_MAX_TEXT = 500  # characters of a parameter, in the oldest versions
_STATUS = {FINISHED: "FINISHED", FAILED: "FAILED"}  # others are KILLED


class MlflowTracker:
    """See `Tracker`."""

    def __init__(self) -> None:
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = importlib.import_module("mlflow").MlflowClient()
        self._run_id = ""

    def open(self, facts: RunFacts, run_id: Optional[str]) -> str:
        """See `Tracker.open`. Parameters that are recorded already cannot change, and stay."""
        if run_id is None:
            created = self._client.create_run(self._experiment(), run_name=facts.name)
            self._run_id = str(created.info.run_id)
        else:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
        known = self._client.get_run(self._run_id).data.params
        new = [(name, value) for name, value in facts.parameters.items() if name not in known]
        for first in range(0, len(new), _PARAMETERS):
            part = new[first : first + _PARAMETERS]
            params = [self._entities.Param(name, value[:_MAX_TEXT]) for name, value in part]
            self._client.log_batch(self._run_id, params=params)
        return self._run_id

    def recorded(self) -> Optional[Steps]:
        names = list(self._client.get_run(self._run_id).data.metrics)
        return Steps(*(self._newest(names, group) for group in ("training/", "test/")))

    def log(self, points: List[Point]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(point.unix_s * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _BATCH])

    def log_image(self, name: str, path: Path, step: int) -> None:
        """See `Tracker`. Versions before 2.12 have no images with a step: there it is an artifact."""
        if "key" not in inspect.signature(self._client.log_image).parameters:
            self._client.log_artifact(self._run_id, str(path), artifact_path="images")
            return
        from PIL import Image  # the process of another tracker needs none

        with Image.open(path) as image:
            self._client.log_image(self._run_id, image, key=_key(name), step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """See `Tracker`: an artifact."""
        self._client.log_text(self._run_id, text, f"texts/{_key(name)}/{step:08d}.txt")

    def add_artifact(self, path: Path, name: str) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), artifact_path=name)
        else:
            self._client.log_artifact(self._run_id, str(path))

    def close(self, end: str, facts: Dict[str, str]) -> None:
        for name, value in facts.items():
            self._client.set_tag(self._run_id, f"raypod.{name}", value)
        self._client.set_terminated(self._run_id, _STATUS.get(end, "KILLED"))

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "raypod")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _newest(self, names: List[str], group: str) -> int:
        """Return the newest step of the metrics of a group; -1 without one."""
        steps = [
            max(each.step for each in self._client.get_metric_history(self._run_id, name))
            for name in names
            if name.startswith(group)
        ]
        return max(steps, default=-1)


def _key(name: str) -> str:
    """Return a name with the characters that MLflow accepts, which is also a path."""
    parts = (re.sub(r"[^A-Za-z0-9_. -]", "_", part).strip(". ") for part in name.split("/"))
    return "/".join(filter(None, parts)) or "_"
