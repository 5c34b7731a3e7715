"""Runs under Ray of the data set and model in `fragile.py`, from the working directory `folder`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

from raypod.plan.plan import Plan
from tests.support.faulty_runs import Outcome, plan_for, run

TRAINING = {"model": "fragile:model", "warmup_updates": 1, "updates": 60, "lr_schedule": "constant", "ema": 0.9}
EPOCH = 20  # updates


def plan_of(folder: Path, name: str, updates: int = 60, instances: int = 2, **run_section: Any) -> Plan:
    """Plan 4 replicas that train for 3 epochs."""
    return plan_for(
        folder / name,
        data={"dataset": "fragile:data"},
        training={**TRAINING, "updates": updates},
        pod={"num_instances": instances},
        run=run_section,
    )


def run_inline(folder: Path, name: str, updates: int = 60) -> Outcome:
    """Run 4 replicas in one instance, in this process."""
    return run(plan_of(folder, name, updates, 1, fleet="inline"))


def fail(folder: Path, failure: str) -> Callable[[Plan], None]:
    """Return a fault of `fragile.py`."""
    return lambda plan: (folder / failure).touch()
