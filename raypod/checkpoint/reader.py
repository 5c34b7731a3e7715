"""The checkpoint that a run goes on from: the newest good one, if it fits the run. No torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import List, Optional, Tuple

from raypod.checkpoint import folder
from raypod.checkpoint.fit import FINGERPRINT, difference, safe_names, settings_of
from raypod.checkpoint.manifest import MANIFEST, Checkpoint
from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan import Plan


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest good checkpoint, and newer ones that are damaged, in words."""

    checkpoint: Checkpoint
    passed_over: Tuple[str, ...]


def newest_good(checkpoints: Path) -> Tuple[Optional[Checkpoint], List[str]]:
    """The newest checkpoint of a folder whose files are what was written, and the newer ones that are not, in words."""
    readable, damaged = folder.found_in(checkpoints)
    passed_over = []
    good: Optional[Checkpoint] = None
    for checkpoint in readable:
        try:
            folder.verify(checkpoint)
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
            checkpoint = folder.read_manifest(path)
            folder.verify(checkpoint)
        except CheckpointDamaged as error:
            raise ConfigError(f"--resume {where}: {error}; its run folder may hold an older one") from None
        return Found(checkpoint, ())
    checkpoints = folder.folder_of(path)
    if not path.is_dir():
        raise ConfigError(f"--resume {where}: there is no such run folder or checkpoint")
    good, passed_over = newest_good(checkpoints)
    if good is None:
        told = f"none that can be used: {'; '.join(passed_over)}" if passed_over else "none"
        raise ConfigError(f"--resume {where}: looked for a checkpoint in {checkpoints} and found {told}")
    return Found(good, tuple(passed_over))
