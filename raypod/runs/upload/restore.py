"""`--resume URL`: restore a run from a remote storage into the run folder, from which it then resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Callable, Iterator, List, Optional

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runs.claim import Claim
from raypod.runs.lease import Log
from raypod.runs.upload import mirror_record, remote_run
from raypod.runs.upload.remote_run import Snapshot
from raypod.system.companion import write_state
from raypod.system.files import rename_folder
from raypod.system.urls import is_url
from raypod.training.checkpoint import resume, storage
from raypod.training.checkpoint.format import Checkpoint

_PARTIAL = ".partial"


def restore(plan: Plan, claim: Claim, log: Log) -> Plan:
    """Return the plan, changed to resume in its run folder, into which the run is copied if `--resume` is a URL.

    A folder that holds the same run and is as new as the storage is not changed. A URL of a checkpoint resumes from
    that one, also if the folder holds later ones; if the run is interrupted then, the same command continues it. Every
    file is verified.

    Raises:
        ConfigError: the run does not fit the plan, no checkpoint is valid, or the folder holds another run.
        RunError: the storage cannot be read.
    """
    where = plan.config.run.resume
    if where is None or not is_url(where):
        return plan
    folder, snapshot = Path(plan.run_dir), remote_run.of_resume(where)
    name, checkpoints = snapshot.run.url.checkpoint, storage.checkpoints_folder(folder)
    with _named(snapshot):
        newest = resume.find_checkpoint(_resuming(plan, snapshot.folder), _was_cut_off(snapshot), verify=False)
    own = _newest_of(folder, snapshot, where)
    is_newer = own is not None and own.age >= newest.checkpoint.age
    if own is not None and is_newer and (name is None or _was_begun(folder, where, own)):
        log(f"{folder} holds {own.path.name} of the same run already; resuming from it")
        return _resuming(plan, folder)
    resumed = folder if name is None else checkpoints / name
    try:
        if is_newer and _is_intact(resumed, newest.checkpoint):
            log(f"{folder} holds {name} already; resuming from it")
        else:
            is_longer = own is not None and is_newer and own.update >= newest.checkpoint.update
            _copy(snapshot, folder, not is_longer, claim.add, log)
        generation = max(each.manifest.generation for each in (own, newest.checkpoint) if each is not None)
        known = dataclasses.replace(mirror_record.read(folder), resumed=where, resumed_generation=generation)
        write_state(folder / layout.STORAGE, known)
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {folder}: {error.strerror or error}") from None
    return _resuming(plan, resumed)


def _newest_of(folder: Path, snapshot: Snapshot, where: str) -> Optional[Checkpoint]:
    """Return the newest checkpoint of a run folder; None if it has none. ConfigError if it holds another run."""
    if not layout.is_run_folder(folder):
        return None
    if snapshot.run_id is None or not _is_run_of(folder, snapshot):
        raise ConfigError(f"--run-dir {folder} holds another run than {where}; choose another folder")
    return resume.newest_valid(storage.checkpoints_folder(folder), verify=False)[0]


def _was_begun(folder: Path, where: str, own: Checkpoint) -> bool:
    """Return whether the interrupted run in a folder, whose newest checkpoint is `own`, has begun from a URL."""
    known = mirror_record.read(folder)
    is_later = own.manifest.generation > known.resumed_generation  # `storage.make_newest`, and the checkpoints after it
    return known.resumed == where and is_later and run_state.is_unfinished(folder)


def _is_intact(path: Path, remote: Checkpoint) -> bool:
    """Return whether a checkpoint of this host is the one of the storage, and valid."""
    try:
        own = storage.read_manifest(path)
        storage.verify(own)
    except CheckpointDamaged:
        return False
    return own.manifest.files == remote.manifest.files


def check(plan: Plan) -> Plan:
    """Check whether a plan can resume from a URL, without copying tensors; return it without `--resume`.

    Raises:
        ConfigError: as `restore`.
    """
    where = plan.config.run.resume
    if where is None or not is_url(where):
        return plan
    snapshot = remote_run.of_resume(where)
    with _named(snapshot):
        resume.find_checkpoint(_resuming(plan, snapshot.folder), _was_cut_off(snapshot), verify=False)
    return _resuming(plan, None)


def _copy(snapshot: Snapshot, folder: Path, with_files: bool, add: Callable[[Path], None], log: Log) -> None:
    """Copy the newest valid checkpoint, and all files of the run. `add` gets each path that is new in the folder.

    The files are replaced once the checkpoint is known to be valid, which has its name last.
    """
    before, checkpoints = set(folder.rglob("*")), storage.checkpoints_folder(folder)
    try:
        checkpoint = _fetch_newest(snapshot, checkpoints, log)
        if with_files:
            run_id = snapshot.run_id or mirror_record.read(folder).run_id
            write_state(folder / layout.STORAGE, mirror_record.MirrorRecord(run_id))
            _, messages = snapshot.run.fetch_files(folder, lambda name: name != layout.SUMMARY)
            for message in messages:
                log(f"warning: {message}")
        target = checkpoints / checkpoint.path.stem
        shutil.rmtree(str(target), ignore_errors=True)
        rename_folder(checkpoint.path, target)
    finally:
        snapshot.run.close()
        for path in sorted(set(folder.rglob("*")) - before):
            add(path)
    log(f"restored {target.name} from {snapshot.run.url.run} into {folder}")


def _fetch_newest(snapshot: Snapshot, checkpoints: Path, log: Log) -> Checkpoint:
    """Copy the newest checkpoint that is valid, under a temporary name. ConfigError if there is none."""
    readable, unreadable = storage.list_checkpoints(storage.checkpoints_folder(snapshot.folder))
    damaged: List[str] = [str(each).replace(str(snapshot.folder), snapshot.run.url.run) for each in unreadable]
    checkpoints.mkdir(parents=True, exist_ok=True)
    for each in readable:
        partial = checkpoints / (each.path.name + _PARTIAL)
        shutil.rmtree(str(partial), ignore_errors=True)
        partial.mkdir()
        try:
            snapshot.run.fetch_checkpoint(each, partial)
        except CheckpointDamaged as error:
            damaged.append(str(error))
            shutil.rmtree(str(partial), ignore_errors=True)
            log(f"warning: {error}; trying an older checkpoint")
            continue
        return Checkpoint(partial, each.manifest)
    raise ConfigError(f"--resume {snapshot.run.url.run}: no valid checkpoint: {'; '.join(damaged) or 'there is none'}")


def _is_run_of(folder: Path, snapshot: Snapshot) -> bool:
    """Return whether a folder holds the run of a snapshot."""
    known, log = mirror_record.read(folder).run_id, b""
    if known:
        return known == snapshot.run_id
    with contextlib.suppress(OSError), (snapshot.folder / layout.EVENTS).open("rb") as file:
        log = file.readline(mirror_record.MOST_LINE_BYTES)
    return mirror_record.is_run_of(folder, log)


def _resuming(plan: Plan, folder: Optional[Path]) -> Plan:
    run = plan.config.run.model_copy(update={"resume": None if folder is None else str(folder)})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"run": run}))


def _was_cut_off(snapshot: Snapshot) -> bool:
    state = run_state.read(snapshot.folder)
    return state is None or state.state != run_state.DONE


@contextlib.contextmanager
def _named(snapshot: Snapshot) -> Iterator[None]:
    """Raise errors about the copy as errors about the run on the storage."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(snapshot.folder), snapshot.run.url.run)) from None
