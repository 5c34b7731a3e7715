"""Resume a run: find its newest valid checkpoint and check that it is compatible with the run's settings.

Does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan import ipu_options
from raypod.plan.config import BOXES, CONTENTS, WINDOW_TASKS, Config
from raypod.plan.layout import CHECKPOINTS, CONFIG
from raypod.plan.learning_rate import DEPEND_ON_LENGTH
from raypod.plan.metric import EpochSums
from raypod.plan.plan import Plan
from raypod.system.command_line import counted
from raypod.system.sdk import activation
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Checkpoint, Manifest

# Settings of the sections `data` and `training` that do not change the training: the location and preparation of the
# data, the placement on IPUs, the evaluation schedule. The run's length counts as LENGTH, only where it has an effect.
_WITHOUT_EFFECT = {
    "data": (
        *("data_dir", "cache_dir", "cache_size", "download", "num_workers", "max_image_pixels", "async_dataloader"),
        "leave_out",  # the ledger has it
    ),
    "training": (
        *("init_weights", "init_ignore", "epochs", "updates", "pipeline_splits", "pipeline_balance", "layers_per_ipu"),
        *("execution", "evaluate_every", "evaluation_iterations", "early_stopping", "early_stopping_metric"),
    ),
}
MEMORY_FORMAT = "training.memory_format"
COMPILED = "emulated.compiled"  # by torch.compile
LENGTH, FINGERPRINT = "total_updates", "data_fingerprint"
# With other values the state still fits and every position still means the same sample; the run can be resumed, but
# computes other weights than an uninterrupted run.
_SAFE_TO_CHANGE = {
    *(LENGTH, FINGERPRINT, MEMORY_FORMAT, COMPILED, "data.jpeg_decoder", "pod.threads_per_replica"),
    *("training.learning_rate", "training.lr_schedule", "training.lr_steps", "training.lr_gamma", "training.lr_floor"),
    *("training.lr_power", "training.lr_frequency", "training.label_smoothing", "training.warmup_updates"),
    *("training.momentum", "training.weight_decay", "training.loss_scaling", "training.initial_loss_scaling"),
    *(f"ipu.{key}" for key in ipu_options.CHANGE_RESULTS),
}
# With --elastic these may differ, if the global batch and the micro-batch are the same: so are the samples of every
# update then, but not the order in which their gradients are summed.
_SUMMATION = ("pod.replicas", "training.gradient_accumulation")
_SAMPLES_OF_UPDATES = ("global_batch_size", "training.batch_size")


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, and messages about newer checkpoints that are damaged."""

    checkpoint: Checkpoint
    damaged: Tuple[str, ...]


def recorded_memory_format(manifest: Manifest) -> str:
    """Return the memory format in which a checkpoint was trained; checkpoints without a record are contiguous."""
    return str(manifest.settings.get(MEMORY_FORMAT, "contiguous"))


def record_memory_format(manifest: Manifest, chosen: Optional[str]) -> Manifest:
    """Return the manifest with the memory format that the SDK has chosen, if the plan leaves the choice to it."""
    if chosen is None or manifest.settings.get(MEMORY_FORMAT) != "auto":
        return manifest
    return dataclasses.replace(manifest, settings={**manifest.settings, MEMORY_FORMAT: chosen})


def in_recorded_format(plan: Plan, manifest: Manifest) -> Plan:
    """Return the plan with the memory format and the numerics of a checkpoint, where it leaves the choice to defaults.

    A checkpoint without a record of the numerics is of a version that left them to the SDK.
    """
    config = plan.config
    if config.training.memory_format == "auto":
        training = config.training.model_copy(update={"memory_format": recorded_memory_format(manifest)})
        config = config.model_copy(update={"training": training})
    numerics = {key: manifest.settings.get(f"ipu.{key}", value) for key, value in ipu_options.SDK_NUMERICS.items()}
    left = {key: value for key, value in numerics.items() if getattr(config.ipu, key) is None}
    if left != {key: value for key, value in ipu_options.numerics_of(config).items() if key in left}:
        config = config.model_copy(update={"ipu": config.ipu.model_copy(update=left)})
    return dataclasses.replace(plan, config=config)


def find_checkpoint(plan: Plan, was_cut_off: bool = False, verify: bool = True) -> ResumePoint:
    """Return the checkpoint that `--resume` names, or the newest valid one of the run folder that it names.

    A run that was cut off after its last update (`was_cut_off`) resumes from there, to do what follows the training.

    Every file of the checkpoint is read and hashed once. Without `verify` only manifests are read: for a process that
    leaves the training, and the verification, to another one.

    Raises:
        ConfigError: no checkpoint is valid, a setting differs (the message names it), or the training is complete.
    """
    return _check_settings(plan, _find(str(plan.config.run.resume), verify), was_cut_off)


def resume_interrupted(plan: Plan, verify: bool = True) -> Tuple[Plan, Optional[ResumePoint]]:
    """Return the plan, changed to resume the interrupted run in its run folder, and the newest valid checkpoint there.

    (`plan`, None) if it has none: the run starts again. `verify` and errors are those of `find_checkpoint`.
    """
    try:
        valid, damaged = restart_point(plan.run_dir, None, verify)
    except CheckpointDamaged as error:
        raise ConfigError(f"--run-dir {plan.run_dir}: {error}") from None
    if valid is None:
        return plan, None
    run = plan.config.run.model_copy(update={"resume": plan.run_dir})
    plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"run": run}))
    return plan, _check_settings(plan, ResumePoint(valid, tuple(damaged)), was_cut_off=True)


def restart_point(
    run_dir: str, resumed: Optional[Checkpoint], verify: bool = True
) -> Tuple[Optional[Checkpoint], List[str]]:
    """Return the checkpoint from which a run continues if no instance has its state, and messages as `newest_valid`.

    It is the newest valid one of the run folder; if that has none, `resumed`; None: the run starts again.

    Raises:
        CheckpointDamaged: the folder has checkpoints, and none is valid: another beginning would overwrite them.
    """
    checkpoints = storage.checkpoints_folder(run_dir)
    valid, damaged = newest_valid(checkpoints, verify)
    if valid is None and damaged:
        hint = f"continue when one of them can be read; to start again from update 0, remove {checkpoints}"
        raise CheckpointDamaged(
            str(checkpoints), f"it has no checkpoint that can be read: {'; '.join(damaged)}; {hint}"
        )
    return valid or resumed, damaged


def way_to_continue(run_dir: str) -> str:
    """Return how a run continues that has ended with an error, for a message."""
    if storage.list_checkpoints(storage.checkpoints_folder(run_dir))[0]:
        return f"continue with --resume {run_dir}"
    return f"start the command again: {run_dir} has no checkpoint"


def newest_valid(checkpoints: Path, verify: bool = True) -> Tuple[Optional[Checkpoint], List[str]]:
    """Return the newest checkpoint of a folder whose files are intact, and messages about newer damaged ones.

    Without `verify` the tensor files are not read, and the newest one with an intact manifest is returned.
    """
    readable, unreadable = storage.list_checkpoints(checkpoints)
    damaged = []
    valid: Optional[Checkpoint] = None
    for checkpoint in readable:
        try:
            if verify:
                storage.verify(checkpoint)
        except CheckpointDamaged as error:
            damaged.append(str(error))
        else:
            valid = checkpoint
            break
    valid_name = valid.path.name if valid else ""
    return valid, [str(error) for error in unreadable if Path(error.path).name > valid_name] + damaged


def check_data(plan: Plan, checkpoint: Checkpoint, data_fingerprint: str) -> None:
    """ConfigError unless the data set is the one that the checkpoint was trained on."""
    recorded, listed = str(checkpoint.manifest.settings.get(FINGERPRINT)), data_fingerprint.partition(CONTENTS)[0]
    if recorded == listed:
        return  # by a version of raypod that hashed no contents of files
    settings = {FINGERPRINT: data_fingerprint}
    difference = first_difference(checkpoint.manifest, settings, allowed_differences(plan))
    if difference is not None and recorded.partition(CONTENTS)[0] == listed:
        hint = f"--resume-anyway {FINGERPRINT} resumes with the present ones"
        what = "its data files have been changed under their names"
        if recorded.partition(BOXES)[0] == data_fingerprint.partition(BOXES)[0]:
            what = f"--bounding-boxes {plan.config.data.bounding_boxes} has other boxes than those of the run"
        difference = f"{what} (data_fingerprint); {hint}"
    if difference is not None:
        raise ConfigError(f"--resume {checkpoint.path}: {difference}")


def manifest_of(
    plan: Plan,
    update: int,
    generation: int,
    data_fingerprint: str,
    versions: Dict[str, str],
    tested: Optional[Dict[str, float]] = None,
    resizes: Sequence[Dict[str, int]] = (),
    epoch_sums: Optional[EpochSums] = None,
) -> Manifest:
    """Return the manifest of a run after `update` updates. The writer adds the files and the hash of the weights."""
    epoch, update_of_epoch = divmod(update, plan.updates_per_epoch)
    return Manifest(
        update=update,
        epoch=epoch,
        position=update_of_epoch * plan.geometry.global_batch_size,
        generation=generation,
        settings={**settings_of(plan), FINGERPRINT: data_fingerprint},
        geometry=dataclasses.asdict(plan.geometry),
        versions=versions,
        tested=tested or {},
        resizes=tuple(resizes),
        epoch_sums=epoch_sums or {},
    )


def settings_of(plan: Plan) -> Dict[str, Any]:
    """Return the settings that determine the training. The most general ones come first: they are reported first."""
    config = plan.config
    settings: Dict[str, Any] = {
        "pod.replicas": plan.geometry.total_replicas,
        "global_batch_size": plan.geometry.global_batch_size,
        "train_samples": plan.dataset_size.train_samples,
    }
    is_text = config.task.name in WINDOW_TASKS  # whose windows are shuffled as a whole, also at a URL
    if plan.dataset_size.shards and not is_text:
        counts = ",".join(map(str, plan.dataset_size.shards))
        name = f"{len(plan.dataset_size.shards)} ({hashlib.sha256(counts.encode()).hexdigest()[:8]})"
        settings["data.shards"] = name
    for section in ("task", "training", "data"):
        for key, value in getattr(config, section).model_dump(mode="json").items():
            if key not in _WITHOUT_EFFECT.get(section, ()):
                settings[f"{section}.{key}"] = value
    if is_text:
        settings["data.shuffle_window"] = None
    if config.data.bounding_boxes is not None:
        settings["data.bounding_boxes"] = "a file"  # whose content is in the data fingerprint
    ipu = {**config.ipu.model_dump(mode="json"), **ipu_options.numerics_of(config)}
    settings.update({f"ipu.{key}": ipu[key] for key in ipu_options.CHANGE_RESULTS})
    settings["pod.threads_per_replica"] = config.pod.threads_per_replica
    settings[COMPILED] = activation.requests_compilation()
    schedule = config.training.lr_schedule
    settings[LENGTH] = plan.total_updates if schedule in DEPEND_ON_LENGTH or ":" in schedule else None
    return settings


def first_difference(manifest: Manifest, settings: Dict[str, Any], allowed: List[str]) -> Optional[str]:
    """Describe the first setting that differs from the checkpoint's and is not in `allowed`; None if there is none."""
    sections = Config().model_dump(mode="json").items()
    defaults = {f"{name}.{key}": value for name, section in sections for key, value in section.items()}
    defaults.update({f"ipu.{key}": value for key, value in ipu_options.SDK_NUMERICS.items()})
    defaults[COMPILED] = False
    for name, ours in settings.items():
        theirs = manifest.settings.get(name, defaults.get(name))
        if name == MEMORY_FORMAT:
            theirs = recorded_memory_format(manifest)
        if name == LENGTH and None in (ours, theirs):
            continue  # the schedule of one of the two does not depend on the length: the schedules are compared instead
        short = name.rpartition(".")[2]
        if theirs == ours or name in allowed or short in allowed:
            continue
        option = f"; --resume-anyway {short} resumes with {ours}" if name in _SAFE_TO_CHANGE else ""
        if name in _SUMMATION and _has_equal_updates(manifest, settings):
            option = "; its updates have the same samples: --elastic resumes, with other bits"
        return f"its {name} is {theirs} and this run's is {ours}{option}"
    return None


def difference_to(plan: Plan, manifest: Manifest, allowed: List[str]) -> Optional[str]:
    """Describe the first setting in which a plan differs from a checkpoint's training, as `first_difference`."""
    settings = settings_of(in_recorded_format(plan, manifest))
    if plan.config.pod.is_elastic and _has_equal_updates(manifest, settings):
        allowed = [*allowed, *_SUMMATION]
    return first_difference(manifest, settings, allowed)


def _has_equal_updates(manifest: Manifest, settings: Dict[str, Any]) -> bool:
    """Return whether every update has the samples, and the micro-batches, of the checkpoint's training."""
    return all(manifest.settings.get(name) == settings.get(name) for name in _SAMPLES_OF_UPDATES)


def _check_settings(plan: Plan, found: ResumePoint, was_cut_off: bool) -> ResumePoint:
    """Return `found`. ConfigError if the plan cannot resume from it."""
    path = found.checkpoint.path
    manifest, allowed = found.checkpoint.manifest, allowed_differences(plan)
    settings = settings_of(in_recorded_format(plan, manifest))
    difference = difference_to(plan, manifest, allowed)
    if difference is not None:
        raise ConfigError(f"--resume {path}: {difference}")
    left = plan.total_updates - found.checkpoint.update
    if left < 0 or (left == 0 and not was_cut_off):
        is_scheduled = None not in (settings[LENGTH], manifest.settings.get(LENGTH)) and LENGTH not in allowed
        anyway = f", and --resume-anyway {LENGTH}: the schedule of the learning rate depends on it"
        is_of_epochs = plan.total_updates == plan.config.training.epochs * plan.updates_per_epoch
        raise ConfigError(
            f"--resume {path}: already at update {found.checkpoint.update} of {plan.total_updates}; "
            f"set a larger {'--epochs' if is_of_epochs else '--updates'}{anyway if is_scheduled else ''}"
        )
    return found


def allowed_differences(plan: Plan) -> List[str]:
    """Parse `--resume-anyway`. ConfigError if it names a setting that is not safe to change."""
    named = [name.strip() for name in (plan.config.run.resume_anyway or "").split(",") if name.strip()]
    safe = sorted(name.rpartition(".")[2] for name in _SAFE_TO_CHANGE)
    unsafe = [name for name in named if name.rpartition(".")[2] not in safe]
    if unsafe:
        raise ConfigError(
            f"--resume-anyway {unsafe[0]}: with another value the state does not fit, or samples would be repeated; "
            f"allowed are {', '.join(safe)}"
        )
    return named


def _find(where: str, verify: bool) -> ResumePoint:
    path = Path(where).resolve()
    if storage.is_checkpoint(path):
        try:
            checkpoint = storage.read_manifest(path)
            if verify:
                storage.verify(checkpoint)
        except CheckpointDamaged as error:
            raise ConfigError(f"--resume {where}: {error}; its run folder may contain an older one") from None
        return ResumePoint(checkpoint, ())
    if not path.is_dir():
        raise ConfigError(f"--resume {where}: {_near(where) or 'there is no such run folder or checkpoint'}")
    checkpoints = storage.checkpoints_folder(path)
    valid, damaged = newest_valid(checkpoints, verify)
    if valid is None:
        if damaged:
            raise ConfigError(f"--resume {where}: {checkpoints} contains no valid checkpoint: {'; '.join(damaged)}")
        again = "; repeat the command that started the run, without --resume" if (path / CONFIG).is_file() else ""
        raise ConfigError(f"--resume {where}: {_near(where) or f'{checkpoints} contains no checkpoint{again}'}")
    return ResumePoint(valid, tuple(damaged))


def _near(where: str) -> str:
    """Return what a file or folder that is no run folder is, if run folders are in or above it; "" if not."""
    path = Path(where)
    if path.is_file():
        folder = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
        is_known = storage.is_checkpoint(folder) or (folder / CONFIG).is_file()
        return f"a file is no run folder; did you mean {folder}?" if is_known else ""
    if (path / CONFIG).is_file():
        return ""
    if path.name == CHECKPOINTS and (path.parent / CONFIG).is_file():
        return f"a folder of checkpoints is no run folder; did you mean {path.parent}?"
    runs = sorted(path.glob(f"*/{CONFIG}"), key=lambda each: each.stat().st_mtime)
    if not runs:
        return ""
    return f"{where} is no run folder; it contains {counted(len(runs), 'run')}, the newest is {runs[-1].parent}"
