"""Weights & Biases: a run of the project `raypod`, or of the one that WANDB_PROJECT names.

WANDB_MODE=offline writes into the folder `wandb` of the run folder, for `wandb sync`.
"""

from __future__ import annotations

import html
import importlib
import os
import uuid
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.observe.trackers.tracker import FINISHED, Point, RunFacts, Steps


class WandbTracker:
    """See `Tracker`."""

    def __init__(self) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None

    def open(self, facts: RunFacts, run_id: Optional[str]) -> str:
        """See `Tracker.open`. The run has no output, system metrics, code or environment: those are the tracker's."""
        settings = {"console": "off", "silent": True, "save_code": False, "disable_git": True}
        known = getattr(self._wandb.Settings, "model_fields", {})
        settings.update({name: True for name in ("x_disable_stats", "x_disable_meta") if name in known})
        run_id = run_id or uuid.uuid4().hex[:12]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raypod"),
            id=run_id,
            name=facts.name,
            dir=str(facts.folder),
            config=facts.parameters,
            resume="allow",
            settings=self._wandb.Settings(**settings),
        )
        self._run.config.update(facts.parameters, allow_val_change=True)
        return run_id

    def recorded(self) -> Optional[Steps]:
        """See `Tracker.recorded`. Only the server can tell; `step` is the next one."""
        step = int(getattr(self._run, "step", 0) or 0)
        return Steps(step - 1, -1) if step > 0 else None

    def log(self, points: List[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def log_image(self, name: str, path: Path, step: int) -> None:
        self._run.log({name: self._wandb.Image(str(path))}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """See `Tracker`: W&B shows a string only in tables, HTML also by itself."""
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def add_artifact(self, path: Path, name: str) -> None:
        kind = "model" if path.is_dir() else "report"
        artifact = self._wandb.Artifact(f"{self._run.id}-{name.replace('/', '-')}", type=kind)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, end: str, facts: Dict[str, str]) -> None:
        self._run.summary.update({f"raypod/{name}": value for name, value in facts.items()})
        self._run.finish(exit_code=0 if end == FINISHED else 1)
