"""`--resume URL`: restore a run from a remote storage into the run folder, from which it then resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Callable, Iterator, List, Tuple

from raypod.checkpoint import resume, storage
from raypod.checkpoint.format import Checkpoint
from raypod.errors import CheckpointDamaged, ConfigError
from raypod.host.files import rename_folder
from raypod.host.lease_file import Log
from raypod.plan.plan import Plan
from raypod.plan.urls import is_url
from raypod.record import event_log, run_folder, run_state
from raypod.record.claim import Claim
from raypod.storage import memory, snapshots
from raypod.storage.snapshots import Snapshot

_PARTIAL = ".partial"


def restore(plan: Plan, claim: Claim, log: Log) -> Plan:
    """Return the plan, changed to resume in its run folder, into which the run is copied if `--resume` is a URL.

    A folder that holds the same run and is as new as the storage is not changed. Every file is verified.

    Raises:
        ConfigError: the run does not fit the plan, no checkpoint is valid, or the folder holds another run.
        RunError: the storage cannot be read.
    """
    where = plan.config.run.resume
    if where is None or not is_url(where):
        return plan
    folder, snapshot = Path(plan.run_dir), snapshots.of_resume(where)
    with _named(snapshot):
        newest = resume.find_checkpoint(_resuming(plan, snapshot.folder), _was_cut_off(snapshot), verify=False)
    if (folder / run_folder.METRICS).exists() or (folder / run_folder.PLAN).exists():
        if snapshot.run_id is None or not _is_run_of(folder, snapshot):
            raise ConfigError(f"--run-dir {folder} holds another run than {where}; choose another folder")
        own, _ = resume.newest_valid(storage.checkpoints_folder(folder), verify=False)
        if own is not None and _age(own) >= _age(newest.checkpoint):
            log(f"{folder} holds {own.path.name} of the same run already; resuming from it")
            return _resuming(plan, folder)
    try:
        _copy(snapshot, folder, claim.add, log)
    except OSError as error:
        raise ConfigError(f"cannot write into the run folder {folder}: {error.strerror or error}") from None
    return _resuming(plan, folder)


def check(plan: Plan) -> Plan:
    """Check whether a plan can resume from a URL, without copying tensors; return it without `--resume`.

    Raises:
        ConfigError: as `restore`.
    """
    where = plan.config.run.resume
    if where is None or not is_url(where):
        return plan
    snapshot = snapshots.of_resume(where)
    with _named(snapshot):
        resume.find_checkpoint(_resuming(plan, snapshot.folder), _was_cut_off(snapshot), verify=False)
    run = plan.config.run.model_copy(update={"resume": None})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"run": run}))


def _copy(snapshot: Snapshot, folder: Path, add: Callable[[Path], None], log: Log) -> None:
    """Copy all files of the run, then the newest valid checkpoint. `add` gets each path that is new in the folder."""
    before = set(folder.rglob("*"))
    try:
        memory.write(folder, memory.Memory(run_id=snapshot.run_id or memory.read(folder).run_id))
        _, messages = snapshot.run.fetch_files(folder, lambda name: name != run_folder.SUMMARY)
        for message in messages:
            log(f"warning: {message}")
        checkpoint = _copy_newest(snapshot, storage.checkpoints_folder(folder), log)
    finally:
        snapshot.run.close()
        for path in sorted(set(folder.rglob("*")) - before):
            add(path)
    log(f"restored {checkpoint.path.name} from {snapshot.run.url.run} into {folder}")


def _copy_newest(snapshot: Snapshot, checkpoints: Path, log: Log) -> Checkpoint:
    """Copy the newest checkpoint that is valid. ConfigError if there is none."""
    readable, unreadable = storage.list_checkpoints(storage.checkpoints_folder(snapshot.folder))
    damaged: List[str] = [str(each).replace(str(snapshot.folder), snapshot.run.url.run) for each in unreadable]
    checkpoints.mkdir(parents=True, exist_ok=True)
    for each in readable:
        target = checkpoints / each.path.name
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
        shutil.rmtree(str(target), ignore_errors=True)
        rename_folder(partial, target)
        return Checkpoint(target, each.manifest)
    raise ConfigError(f"--resume {snapshot.run.url.run}: no valid checkpoint: {'; '.join(damaged) or 'there is none'}")


def _is_run_of(folder: Path, snapshot: Snapshot) -> bool:
    """Return whether a folder holds the run of a snapshot."""
    known, log = memory.read(folder).run_id, b""
    if known:
        return known == snapshot.run_id
    with contextlib.suppress(OSError), (snapshot.folder / event_log.NAME).open("rb") as file:
        log = file.readline(memory.MOST_LINE_BYTES)
    return memory.is_run_of(folder, log)


def _resuming(plan: Plan, folder: Path) -> Plan:
    run = plan.config.run.model_copy(update={"resume": str(folder)})
    return dataclasses.replace(plan, config=plan.config.model_copy(update={"run": run}))


def _was_cut_off(snapshot: Snapshot) -> bool:
    state = run_state.read(snapshot.folder)
    return state is None or state.state != run_state.DONE


def _age(checkpoint: Checkpoint) -> Tuple[int, int]:
    return checkpoint.manifest.generation, checkpoint.update


@contextlib.contextmanager
def _named(snapshot: Snapshot) -> Iterator[None]:
    """Raise errors about the copy as errors about the run on the storage."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(snapshot.folder), snapshot.run.url.run)) from None
