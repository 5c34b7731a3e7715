"""Read TensorBoard event files with TensorBoard's own reader."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Dict, List, Tuple

from raypod.record.sinks import TENSORBOARD_FOLDER


def scalars(run_dir: Path) -> Dict[str, List[Tuple[int, float]]]:
    """Return the (step, value) pairs of each tag in a run folder."""
    package = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = package.EventAccumulator(str(run_dir / TENSORBOARD_FOLDER))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}
