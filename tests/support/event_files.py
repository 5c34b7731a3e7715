"""Read TensorBoard event files with TensorBoard's own reader."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Dict, List, Tuple

from raypod.plan.layout import TENSORBOARD


def scalars(run_dir: Path) -> Dict[str, List[Tuple[int, float]]]:
    """Return the (step, value) pairs of each tag in a run folder."""
    package = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = package.EventAccumulator(str(run_dir / TENSORBOARD))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}
