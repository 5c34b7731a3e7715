"""Training in half precision and with every optimizer reduces the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from raypod.events import UpdateDone
from raypod.plan.plan import Plan
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint import writer
from tests.support.scripted_runs import events_of, of

VIT = {"model": "vit_tiny", "optimizer": "adam", "learning_rate": 0.001, "updates": 120}


@pytest.mark.parametrize(
    ("flags", "least", "dtype"),
    [
        ({"precision": "16.16", "learning_rate": 0.05}, 0.95, torch.float16),
        ({"precision": "16.32", "learning_rate": 0.05}, 0.95, torch.float32),
        ({**VIT, "precision": "16.16"}, 0.95, torch.float16),
        ({**VIT, "precision": "16.32"}, 0.95, torch.float32),
        ({**VIT, "precision": "32.32"}, 0.95, torch.float32),
        ({"optimizer": "adam", "learning_rate": 0.003}, 0.8, torch.float32),
        ({"optimizer": "adamw", "learning_rate": 0.003}, 0.8, torch.float32),
    ],
)
def test_precisions_optimizers_train(make: Callable[..., Plan], flags: Any, least: float, dtype: torch.dtype) -> None:
    plan = make(training={"updates": 60, **flags}, run={"fleet": "inline", "device": "emulated"})
    losses = [event.loss for event in of(events_of(plan, InlineFleet(plan)), UpdateDone)]
    assert sum(losses[-10:]) < least * sum(losses[:10])
    checkpoint = Path(plan.run_dir) / "checkpoints" / f"update-{plan.total_updates:08d}"
    first, *_ = writer.load_checkpoint(checkpoint)["weights"].values()
    assert first.dtype == dtype
