"""Find the file of the weights with which a run starts. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from raypod.checkpoint import storage
from raypod.checkpoint.format import EMA, WEIGHTS, best_of
from raypod.errors import ConfigError
from raypod.plan.plan import Plan

_FLAG = "--init-weights"


def check_on_head(plan: Plan) -> None:
    """Raise ConfigError if `--init-weights` names nothing usable, or nothing on a pod that is this host alone.

    On other pods the path may exist only on the host of instance 0, which reads it.
    """
    where = plan.config.training.init_weights
    if where is not None and (Path(where).exists() or plan.placement.cluster.is_local):
        find_weights(plan, where)


def find_weights(plan: Plan, where: str) -> Path:
    """Return a file of weights: `where` itself, or that of a checkpoint, or of the best checkpoint of a run folder.

    The best one is that with the best result by the plan's metric; without any evaluation, the newest one. Averaged
    weights take precedence: they are what was evaluated.

    Raises:
        ConfigError: there is no such file, or no checkpoint in the folder.
    """
    path = Path(where)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{_FLAG} {where}: there is no such file, run folder or checkpoint")
    folder = path
    if not storage.is_checkpoint(path):
        found, damaged = storage.list_checkpoints(storage.checkpoints_folder(path))
        best = best_of(found, plan.best_metric) or next(iter(found), None)
        if best is None:
            reason = str(damaged[0]) if damaged else f"{storage.checkpoints_folder(path)} contains no checkpoint"
            raise ConfigError(f"{_FLAG} {where}: {reason}")
        folder = best.path
    for name in (EMA, WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{_FLAG} {where}: {folder} has no {WEIGHTS}")
