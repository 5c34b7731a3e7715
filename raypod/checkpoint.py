"""Which checkpoints a run folder holds, and whether one fits the run that wants to go on from it.

A checkpoint is two files, `update-00000440.pt` (weights and optimizer state, see weights.py) and, written after it,
`update-00000440.json` (where in the run it was taken). Reading the second needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from raypod.errors import ConfigError
from raypod.plan import Plan


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a checkpoint was taken, and what must be the same to go on from there exactly."""

    update: int
    seed: int
    replicas: int
    batch_size: int
    gradient_accumulation: int
    device_iterations: int
    dataset: str
    train_samples: int
    model: str
    precision: str
    optimizer: str
    reduction: str
    weights_sha256: str


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A weights file, and where it was taken."""

    path: Path
    position: Position


def position_of(plan: Plan, update: int, weights_sha256: str) -> Position:
    """The position of a run after `update` updates."""
    training = plan.config.training
    return Position(
        update=update,
        seed=training.seed,
        replicas=plan.geometry.total_replicas,
        batch_size=training.batch_size,
        gradient_accumulation=training.gradient_accumulation,
        device_iterations=training.device_iterations,
        dataset=plan.config.data.dataset,
        train_samples=plan.size.train_samples,
        model=training.model,
        precision=training.precision,
        optimizer=training.optimizer,
        reduction=training.reduction,
        weights_sha256=weights_sha256,
    )


def weights_path(plan: Plan, update: int) -> Path:
    """The weights file of the checkpoint after `update` updates."""
    return Path(plan.run_dir) / "checkpoints" / f"update-{update:08d}.pt"


def commit(plan: Plan, update: int, weights_sha256: str) -> None:
    """Write the position; from now on the checkpoint exists."""
    path = weights_path(plan, update).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(position_of(plan, update, weights_sha256)), indent=2) + "\n")
    partial.replace(path)


def _find(where: str) -> Path:
    """The weights file that `--resume` names: a checkpoint, or the newest one of a run folder.

    Raises:
        ConfigError: there is none.
    """
    path = Path(where)
    if path.is_dir():
        found = sorted((path / "checkpoints").glob("update-*.json"))
        if not found:
            raise ConfigError(f"--resume {where}: no checkpoint in {path / 'checkpoints'}")
        path = found[-1]
    path = path.with_suffix(".pt")
    for part in (path, path.with_suffix(".json")):
        if not part.is_file():
            raise ConfigError(f"--resume {where}: {part} does not exist")
    return path.resolve()


def read(plan: Plan) -> Checkpoint:
    """The checkpoint that `--resume` names, if this plan can go on from it.

    Raises:
        ConfigError: there is none, it is damaged, or something differs, which is named.
    """
    path = _find(str(plan.config.run.resume))
    try:
        position = Position(**json.loads(path.with_suffix(".json").read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--resume: {path.with_suffix('.json')} is damaged: {error}") from None
    ours = position_of(plan, position.update, position.weights_sha256)
    for field in dataclasses.fields(Position):
        theirs, mine = getattr(position, field.name), getattr(ours, field.name)
        if theirs != mine:
            raise ConfigError(f"--resume {path}: its {field.name} is {theirs} and this run's is {mine}")
    if position.update >= plan.total_updates:
        raise ConfigError(
            f"--resume {path}: already at update {position.update} of {plan.total_updates}; give more --epochs"
        )
    return Checkpoint(path, position)
