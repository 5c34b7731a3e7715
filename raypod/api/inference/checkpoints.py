"""Find the checkpoint of a run folder that a command names, and load its verified weights."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Collection, Dict, List, Mapping, Optional, Union

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.config import Config
from raypod.plan.layout import CHECKPOINTS, CONFIG
from raypod.runs import run_state
from raypod.runs.run_state import RunEndWatch
from raypod.runs.upload import remote_run
from raypod.system.command_line import counted, show
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import EMA, WEIGHTS, Checkpoint, best_of, of_course
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.tasks.registry import facts_of, load_config

if TYPE_CHECKING:
    import torch

PathLike = Union[str, "os.PathLike[str]"]
BEST, LAST = "best", "last"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, with its config; or a checkpoint of it, if the user has named one."""

    folder: Path
    config: Config
    checkpoint: Optional[Path] = None

    @property
    def checkpoints(self) -> Path:
        return storage.checkpoints_folder(self.folder)

    @property
    def outputs(self) -> Path:
        """The folder of what commands write by default: the run folder, or the current one for a remote run."""
        return Path() if remote_run.is_copy(self.folder) else self.folder


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of a checkpoint, or of a safetensors file.

    Attributes:
        tensors: by name, on the CPU.
        path: where they were read.
        update: the number of updates done; None if it is not known.
        metadata: of a safetensors file.
    """

    tensors: Mapping[str, torch.Tensor]
    path: Path
    update: Optional[int] = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)


def open_run(where: PathLike, trusted: Collection[str] = ()) -> Run:
    """Return the run of a run folder, or of the folder of one of its checkpoints.

    Raises:
        ConfigError: it is neither, its config cannot be read, or names code that is not among `trusted`
            (`stored_code.check`).
    """
    path = remote_run.local_folder(os.fspath(where), "RUN").resolve()
    if not path.is_dir():
        raise ConfigError(f"{where}: there is no such run folder or checkpoint")
    checkpoint = path if storage.is_checkpoint(path) else None
    folder = path if checkpoint is None else path.parent.parent
    if not (folder / CONFIG).is_file():
        what = (
            "is not a run folder"
            if checkpoint is None
            else f"is a checkpoint outside of {CHECKPOINTS}/ of a run folder"
        )
        raise ConfigError(f"{where} {what} (there is no {folder / CONFIG})")
    return Run(folder, load_config(folder / CONFIG, trusted), checkpoint)


def check_has_ended(run: Run, hint: str) -> None:
    """Raise ConfigError if the run still trains; `hint` is the end of the message."""
    state = run_state.read(run.folder)
    watch = RunEndWatch(run.folder)
    watch.observe(lambda text: show(text, sys.stderr))
    has_died = watch.has_died and not remote_run.is_copy(run.folder)  # a copy has no lease
    if state is not None and state.may_be_running and not has_died:
        where = "" if state.is_local else f" on host {state.host}"
        raise ConfigError(f"{run.folder} is still training{where} (update {state.update}); {hint}")


def load(run: Run, name: Optional[str] = None, ema: Optional[bool] = None) -> Weights:
    """Return the weights that a command names.

    Args:
        run: the run.
        name: "best", "last" (the default, unless `run` is a checkpoint), the name or update of a checkpoint of the
            run, or the path of a checkpoint or of a safetensors file.
        ema: as of `load_checkpoint`.

    Raises:
        ConfigError: there is no such checkpoint, it is damaged, or the run still trains and `name` is None.
    """
    if name is None and run.checkpoint is None:
        check_has_ended(run, "wait for its end, or name a checkpoint with --checkpoint last")
    if name is not None and run.checkpoint is not None:
        raise ConfigError(f"--checkpoint {name}: {run.checkpoint} is a checkpoint already; omit one of the two")
    path = run.checkpoint or _path_of(run, name or LAST)
    if path.is_file() and ema is not None:
        raise ConfigError(f"--ema and --no-ema have no effect on the file {path}: omit them")
    return _from_file(path) if path.is_file() else load_checkpoint(path, ema)


def load_checkpoint(path: Path, ema: Optional[bool] = None) -> Weights:
    """Return the weights of a checkpoint after verifying all its files, as for a resume.

    Args:
        path: its folder.
        ema: whether the weights are the exponential moving average of those that were trained. None: where the
            checkpoint has it, which is what the training evaluates.

    Raises:
        ConfigError: the checkpoint is damaged, or has no moving average.
    """
    from raypod.training.checkpoint import tensors  # planning and help work without torch

    remote_run.complete(path)
    try:
        checkpoint = storage.read_manifest(path)
        storage.verify(checkpoint)
        weights, _ = tensors.read_tensors(path / WEIGHTS)
        if tensors.weights_sha256(weights) != checkpoint.manifest.weights_sha256:
            raise CheckpointDamaged(str(path), "the hash of its weights differs from the one in its manifest")
        has_ema = EMA in checkpoint.manifest.files
        if ema and not has_ema:
            raise ConfigError(f"--ema: {path} has no moving average of the weights; train with --ema 0.999")
        averaged = tensors.read_tensors(path / EMA)[0] if has_ema and ema is not False else {}
    except CheckpointDamaged as error:
        raise ConfigError(str(error)) from None
    return Weights({**weights, **averaged}, path, checkpoint.update)


def newest(run: Run, count: int) -> List[Checkpoint]:
    """Return the newest checkpoints of a run, newest first. ConfigError if there are fewer, or one is damaged."""
    found = _listed(run)
    if len(found) < count:
        names = ", ".join(each.path.name for each in found)
        raise ConfigError(
            f"{run.checkpoints} has {counted(len(found), 'checkpoint')} ({names}), and {count} are needed: "
            f"train with --keep-checkpoints {count}, or use --last {len(found)}"
        )
    return found[:count]


def _path_of(run: Run, name: str) -> Path:
    if name == LAST:
        return _last(run)
    if name == BEST:
        return _best(run)
    inside = run.checkpoints / name
    if name.isdigit():
        inside = storage.checkpoint_path(run.checkpoints, int(name))
    path = inside if storage.is_checkpoint(inside) else Path(name)
    if not path.is_file() and not storage.is_checkpoint(path):
        known = ", ".join(each.path.name for each in storage.list_checkpoints(run.checkpoints)[0]) or "none"
        raise ConfigError(f"--checkpoint {name}: there is no such checkpoint or file; checkpoints of the run: {known}")
    return path.resolve()


def _last(run: Run) -> Path:
    """Return the newest checkpoint. An older one does not replace it if it is damaged: that would change the result."""
    valid, damaged = newest_valid(run.checkpoints, verify=False)
    if damaged:
        older = f"; the newest other one is --checkpoint {valid.path.name}" if valid else ""
        raise ConfigError(f"{damaged[0]}{older}")
    if valid is None:
        raise ConfigError(f"{run.checkpoints} contains no checkpoint")
    return valid.path


def _best(run: Run) -> Path:
    found = _listed(run)
    facts = facts_of(run.config, is_dry=True)
    name = run.config.run.best_metric or facts.best
    metric = next(each for each in facts.metrics if each.name == name)
    best = best_of(found, metric)
    if best is None:
        raise ConfigError(
            f"no checkpoint in {run.checkpoints} was evaluated by its {metric.name}; use --checkpoint last"
        )
    return best.path


def _listed(run: Run) -> List[Checkpoint]:
    found, damaged = storage.list_checkpoints(run.checkpoints)
    if damaged or not found:
        raise ConfigError(str(damaged[0]) if damaged else f"{run.checkpoints} contains no checkpoint")
    return of_course(found)


def _from_file(path: Path) -> Weights:
    from raypod.training.checkpoint import tensors  # as above

    try:
        weights, metadata = tensors.read_tensors(path)
    except CheckpointDamaged as error:
        raise ConfigError(str(error)) from None
    update = metadata.get("raypod.update", "")
    return Weights(weights, path, int(update) if update.isdigit() else None, metadata)


def described(weights: Weights) -> Dict[str, Union[str, int, None]]:
    """Return where the weights are from, and their hash, as plain data."""
    from raypod.training.checkpoint import tensors  # as above

    sha256 = tensors.weights_sha256(weights.tensors)
    return {"checkpoint": remote_run.shown(weights.path), "update": weights.update, "weights_sha256": sha256}
