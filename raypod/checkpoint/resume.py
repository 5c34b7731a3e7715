"""The checkpoint that a run goes on from: the newest good one, if it fits the run. No torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from raypod.checkpoint import format
from raypod.checkpoint.format import Checkpoint, Manifest
from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.config import Config
from raypod.plan.plan import Plan
from raypod.plan.resolve import MANIFEST


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest good checkpoint, and newer ones that are damaged, in words."""

    checkpoint: Checkpoint
    passed_over: Tuple[str, ...]


def newest_good(checkpoints: Path) -> Tuple[Optional[Checkpoint], List[str]]:
    """The newest checkpoint of a folder whose files are what was written, and the newer ones that are not, in words."""
    readable, damaged = format.found_in(checkpoints)
    passed_over = []
    good: Optional[Checkpoint] = None
    for checkpoint in readable:
        try:
            format.verify(checkpoint)
        except CheckpointDamaged as error:
            passed_over.append(str(error))
        else:
            good = checkpoint
            break
    newest_name = good.path.name if good else ""
    return good, [str(error) for error in damaged if Path(error.path).name > newest_name] + passed_over


def read(plan: Plan, was_cut_off: bool = False) -> Found:
    """The checkpoint that `--resume` names: itself, or the newest good one of a run folder.

    A run that was cut off after its last update goes on from there: it has its end to make.

    Raises:
        ConfigError: there is none that can be read, or something differs, which is named.
    """
    where = str(plan.config.run.resume)
    found = _find(where)
    path = found.checkpoint.path
    told = difference(found.checkpoint.manifest, settings_of(plan), _allowed(plan))
    if told is not None:
        raise ConfigError(f"--resume {path}: {told}")
    left = plan.total_updates - found.checkpoint.update
    if left < 0 or (left == 0 and not was_cut_off):
        raise ConfigError(
            f"--resume {path}: already at update {found.checkpoint.update} of {plan.total_updates}; "
            "give more --epochs or --updates"
        )
    return found


def check_data(plan: Plan, checkpoint: Checkpoint, data_fingerprint: str) -> None:
    """ConfigError unless the data is the data that the checkpoint was trained on."""
    told = difference(checkpoint.manifest, {FINGERPRINT: data_fingerprint}, _allowed(plan))
    if told is not None:
        raise ConfigError(f"--resume {checkpoint.path}: {told}")


def _allowed(plan: Plan) -> List[str]:
    named = [name.strip() for name in (plan.config.run.resume_anyway or "").split(",") if name.strip()]
    unsafe = [name for name in named if name.rpartition(".")[2] not in safe_names()]
    if unsafe:
        raise ConfigError(
            f"--resume-anyway {unsafe[0]}: with another value the state does not fit, or samples would be repeated; "
            f"it may name {', '.join(safe_names())}"
        )
    return named


def _find(where: str) -> Found:
    path = Path(where).resolve()
    if (path / MANIFEST).exists():
        try:
            checkpoint = format.read_manifest(path)
            format.verify(checkpoint)
        except CheckpointDamaged as error:
            raise ConfigError(f"--resume {where}: {error}; its run folder may hold an older one") from None
        return Found(checkpoint, ())
    checkpoints = format.folder_of(path)
    if not path.is_dir():
        raise ConfigError(f"--resume {where}: there is no such run folder or checkpoint")
    good, passed_over = newest_good(checkpoints)
    if good is None:
        told = f"none that can be used: {'; '.join(passed_over)}" if passed_over else "none"
        raise ConfigError(f"--resume {where}: looked for a checkpoint in {checkpoints} and found {told}")
    return Found(good, tuple(passed_over))


# --- from checkpoint.fit: Whether a run can go on from a checkpoint: what must be the same for the same training, what may safely differ.

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
