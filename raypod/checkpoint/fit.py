"""Whether a run can go on from a checkpoint: what must be the same for the same training, what may safely differ."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional

from raypod.checkpoint.manifest import Manifest
from raypod.config import Config
from raypod.plan import Plan

# Of the sections `data` and `training`: where data is and who prepares it, what lies on which IPU, when to evaluate;
# and the length of the run, which counts by what follows from it.
_WITHOUT_EFFECT = {
    "data.data_dir",
    "data.cache_dir",
    "data.download",
    "data.num_workers",
    "data.async_dataloader",
    "training.epochs",
    "training.updates",
    "training.evaluate_every",
    "training.evaluation_iterations",
    "training.pipeline_splits",
    "training.pipeline_balance",
    "training.execution",
}
LENGTH, FINGERPRINT = "total_updates", "data_fingerprint"
# The state fits and every position means the same sample: the run goes on, though not as the undisturbed one would.
_SAFE_TO_CHANGE = {
    LENGTH,
    FINGERPRINT,
    "training.learning_rate",
    "training.lr_schedule",
    "training.lr_steps",
    "training.lr_gamma",
    "training.label_smoothing",
    "training.warmup_updates",
    "training.momentum",
    "training.weight_decay",
    "training.loss_scaling",
    "pod.threads_per_replica",
}


def manifest_of(plan: Plan, update: int, generation: int) -> Manifest:
    """The manifest of a run after `update` updates; what only an instance knows is added there."""
    epoch, in_epoch = divmod(update, plan.updates_per_epoch)
    return Manifest(
        update=update,
        epoch=epoch,
        position=in_epoch * plan.geometry.global_batch_size,
        generation=generation,
        settings=settings_of(plan),
        geometry=dataclasses.asdict(plan.geometry),
        versions={},
    )


def settings_of(plan: Plan) -> Dict[str, Any]:
    """What must be the same for the same training, the most telling first."""
    config = plan.config
    settings: Dict[str, Any] = {
        "pod.replicas": plan.geometry.total_replicas,
        "global_batch_size": plan.geometry.global_batch_size,
        "train_samples": plan.size.train_samples,
    }
    for section in ("training", "data"):
        for key, value in getattr(config, section).model_dump(mode="json").items():
            if f"{section}.{key}" not in _WITHOUT_EFFECT:
                settings[f"{section}.{key}"] = value
    settings["pod.threads_per_replica"] = config.pod.threads_per_replica
    # A schedule over the whole run has another learning rate at every update when the run has another length.
    settings[LENGTH] = plan.total_updates if config.training.lr_schedule == "cosine" else None
    return settings


def difference(manifest: Manifest, settings: Dict[str, Any], allowed: List[str]) -> Optional[str]:
    """The first setting that is not the one of the checkpoint, in words; None if all are. `allowed` may differ."""
    sections = Config().model_dump(mode="json").items()
    defaults = {f"{name}.{key}": value for name, part in sections for key, value in part.items()}
    for name, ours in settings.items():
        theirs = manifest.settings.get(name, defaults.get(name))
        if name == LENGTH and None in (ours, theirs):
            continue  # no cosine, or no cosine before: what differs is the schedule
        if theirs == ours or name in allowed or name.rpartition(".")[2] in allowed:
            continue
        short = name.rpartition(".")[2]
        way_out = f"; --resume-anyway {short} goes on with {ours}" if name in _SAFE_TO_CHANGE else ""
        return f"its {name} is {theirs} and this run's is {ours}{way_out}"
    return None


def safe_names() -> List[str]:
    """What `--resume-anyway` may name."""
    return sorted(name.rpartition(".")[2] for name in _SAFE_TO_CHANGE)
