"""Find the file of the weights with which a run starts, or that a network loads. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.metric import Metric
from raypod.plan.plan import Plan
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import EMA, WEIGHTS, Checkpoint, best_of

_FLAG = "--init-weights"


def check_on_head(plan: Plan, verify: bool = True) -> None:
    """Raise ConfigError if `--init-weights` names nothing usable, or nothing on a pod that is this host alone.

    On other pods the path may exist only on the host of instance 0, which reads it. Without `verify` only the manifest
    of a checkpoint is read.
    """
    where = plan.config.training.init_weights
    if where is not None and (Path(where).exists() or plan.placement.cluster.is_local):
        find_weights(plan, where, verify)


def find_weights(plan: Plan, where: str, verify: bool = True) -> Path:
    """Return a file of weights: `where` itself, or that of a checkpoint, or of the best checkpoint of a run folder.

    The best one is that by the plan's metric. All files of a checkpoint are verified, also if `where` is one of them.

    Raises:
        ConfigError: there is no such file, no checkpoint in the folder, or the checkpoint is damaged; no other one
            takes its place.
    """
    path = Path(where)
    folder = path.parent if path.is_file() else path
    is_checkpoint = storage.is_checkpoint(folder)
    if path.is_file() and not is_checkpoint:
        return path
    if not path.exists():
        raise ConfigError(f"{_FLAG} {where}: there is no such file, run folder or checkpoint")
    try:
        found = storage.read_manifest(folder) if is_checkpoint else best_checkpoint(folder, plan.best_metric)
        if found is None:
            raise ConfigError(f"{_FLAG} {where}: {storage.checkpoints_folder(folder)} contains no checkpoint")
        if verify:
            storage.verify(found)
    except CheckpointDamaged as error:
        raise ConfigError(f"{_FLAG} {where}: {error}; name another checkpoint of the run") from None
    return path if path.is_file() else weights_of(found)


def best_checkpoint(run_dir: Path, metric: Metric) -> Optional[Checkpoint]:
    """Return the checkpoint with the best test result; without any evaluation, the newest one; None if there is none.

    Raises:
        CheckpointDamaged: the manifest of a checkpoint cannot be read, so that it could be the best one.
    """
    found, damaged = storage.list_checkpoints(storage.checkpoints_folder(run_dir))
    if damaged:
        raise damaged[0]
    return best_of(found, metric) or next(iter(found), None)


def weights_of(checkpoint: Checkpoint) -> Path:
    """Return the file of the weights of a checkpoint that were evaluated: the averaged ones, if it has them."""
    return checkpoint.path / (EMA if EMA in checkpoint.manifest.files else WEIGHTS)
