"""Checkpoints on the local file system: names, listing, atomic creation, verification of their hashes, and removal.

A run folder has the folder `checkpoints/` with a folder per checkpoint and the file `LATEST`, which names the newest.
Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ContextManager, Dict, Iterator, List, Optional, Tuple, Union

from raypod.errors import CheckpointDamaged
from raypod.plan.config import MANIFEST
from raypod.plan.layout import CHECKPOINTS
from raypod.system import files
from raypod.training.checkpoint import format
from raypod.training.checkpoint.format import (
    Checkpoint,
    FileRecord,
    Manifest,
    Retention,
    checkpoints_to_remove,
    manifest_from_json,
)

MANIFEST_SHA256, LATEST = "manifest.sha256", "LATEST"
_PARTIAL, _REMOVED = ".partial", ".removed"
_NAME = re.compile(r"update-(\d+)$")
_MOST_THREADS = 4  # that hash files: a checkpoint has at most four


def checkpoints_folder(run_dir: Union[str, Path]) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(run_dir) / CHECKPOINTS


def checkpoint_path(checkpoints: Path, update: int) -> Path:
    """Return the folder of the checkpoint after `update` updates."""
    return checkpoints / f"update-{update:08d}"


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, possibly a damaged one."""
    return (path / MANIFEST).exists()


def latest_name(run_dir: Path) -> Optional[str]:
    """Return the name of the checkpoint that was written last; None if there is none."""
    latest = checkpoints_folder(run_dir) / LATEST
    return latest.read_text().strip() if latest.is_file() else None


def list_checkpoints(checkpoints: Path) -> Tuple[List[Checkpoint], List[CheckpointDamaged]]:
    """Return the checkpoints of a folder, newest first, and an error for each whose manifest cannot be read.

    A folder that cannot be listed is such an error itself; one that does not exist has no checkpoints.
    """
    readable: List[Checkpoint] = []
    damaged: List[CheckpointDamaged] = []
    try:
        # Not `glob`, which omits what it cannot read.
        names = [entry.name for entry in os.scandir(str(checkpoints)) if _NAME.match(entry.name) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return [], []
    except OSError as error:
        return [], [CheckpointDamaged(str(checkpoints), f"it cannot be listed ({error.strerror})")]
    for name in sorted(names, reverse=True):
        try:
            readable.append(read_manifest(checkpoints / name))
        except CheckpointDamaged as error:
            damaged.append(error)
    readable.sort(key=lambda each: each.age, reverse=True)
    return readable, damaged


def read_manifest(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and check its hash. The tensor files are not read.

    Raises:
        CheckpointDamaged: the manifest is missing or was changed.
    """
    try:
        text, hashes = ((path / name).read_bytes() for name in (MANIFEST, MANIFEST_SHA256))
    except OSError as error:
        raise CheckpointDamaged(str(path), f"its manifest cannot be read ({error})") from None
    return parse_manifest(path, text, hashes)


def parse_manifest(path: Path, text: bytes, hashes: bytes) -> Checkpoint:
    """Return the checkpoint `path` from the contents of its manifest and of the file with the hashes of that.

    Raises:
        CheckpointDamaged: they do not match, or the manifest cannot be parsed.
    """
    if hashlib.sha256(text).hexdigest().encode() not in hashes.split()[::2]:
        raise CheckpointDamaged(str(path), f"the SHA-256 of {MANIFEST} does not match {MANIFEST_SHA256}")
    try:
        return Checkpoint(path, manifest_from_json(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(str(path), f"{MANIFEST} cannot be parsed ({error})") from None


def sha256_line(text: bytes) -> bytes:
    """Return the content of `manifest.sha256` for a manifest, in the format of `sha256sum`."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def replace_manifest(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Replace the manifest of a checkpoint. It stays readable if the process is killed at any point.

    Raises:
        OSError: the file system's own, for example on a full disk.
    """
    old, new = checkpoint.manifest.to_json(), manifest.to_json()
    # Both hashes are valid while the manifest itself is replaced.
    files.replace_file(checkpoint.path / MANIFEST_SHA256, sha256_line(old) + sha256_line(new))
    files.replace_file(checkpoint.path / MANIFEST, new)
    files.replace_file(checkpoint.path / MANIFEST_SHA256, sha256_line(new))


def make_newest(checkpoint: Checkpoint, generation: int) -> None:
    """Give a checkpoint from which a run continues a `generation` that orders it after all others of its folder.

    Otherwise the run would later continue from one of an earlier course. If it is the newest already, only `LATEST` is
    written, where that names another one.

    Raises:
        OSError: the file system's own, for example on a full disk.
    """
    path, checkpoints = checkpoint.path, checkpoint.path.parent
    readable, damaged = list_checkpoints(checkpoints)
    newer = [each for each in readable if each.age > checkpoint.age]
    if newer or any(Path(error.path).name > path.name for error in damaged):
        replace_manifest(checkpoint, dataclasses.replace(checkpoint.manifest, generation=generation))
    with contextlib.suppress(OSError):  # nothing resumes from it, and the next checkpoint replaces it
        if latest_name(checkpoints.parent) != path.name:  # also if the run was killed before it could write the name
            files.replace_file(checkpoints / LATEST, _latest_line(path))


def verify(checkpoint: Checkpoint) -> None:
    """Check the size and hash of every file, in threads. CheckpointDamaged names the first one that does not match."""
    for name, record in checkpoint.manifest.files.items():
        try:
            facts = (checkpoint.path / name).stat()
        except FileNotFoundError:
            facts = None
        except OSError as error:
            raise CheckpointDamaged(str(checkpoint.path / name), error.strerror or str(error)) from None
        if Path(name).name != name or facts is None or not stat.S_ISREG(facts.st_mode):
            raise CheckpointDamaged(str(checkpoint.path), f"{name} is missing")
        size = facts.st_size
        if size != record.size_bytes:
            raise CheckpointDamaged(str(checkpoint.path), f"{name} has {size} bytes, expected {record.size_bytes}")
    threads = max(1, min(len(checkpoint.manifest.files), len(os.sched_getaffinity(0)), _MOST_THREADS))
    with ThreadPoolExecutor(threads, "checkpoint-verify") as pool:
        for each in [pool.submit(_verify_hash, checkpoint.path, *item) for item in checkpoint.manifest.files.items()]:
            each.result()


@contextlib.contextmanager
def unless_removed(path: Path) -> Iterator[None]:
    """End the block without an error if it fails since the checkpoint `path` was removed meanwhile."""
    try:
        yield
    except (CheckpointDamaged, FileNotFoundError):
        if is_checkpoint(path):
            raise


def open_files(checkpoint: Checkpoint, stack: contextlib.ExitStack) -> Dict[str, files.FilePart]:
    """Open all tensor files of a checkpoint until `stack` ends: they can be read if it is removed meanwhile.

    Raises:
        OSError: a file is missing, as if the checkpoint was removed.
    """
    return {
        name: files.FilePart(stack.enter_context((checkpoint.path / name).open("rb")), record.size_bytes)
        for name, record in checkpoint.manifest.files.items()
    }


def identity(path: Path) -> Tuple[int, ...]:
    """Return numbers that are equal on two hosts only if `path` is the same checkpoint for both, on a shared disk.

    They are the inode number, size, modification and change time of its manifest; a copy has another change time.

    Raises:
        CheckpointDamaged: there is no manifest.
    """
    try:
        facts = (path / MANIFEST).stat()
    except OSError as error:
        raise CheckpointDamaged(str(path), f"its manifest cannot be read ({error})") from None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


@contextlib.contextmanager
def unique_file(checkpoints: Path) -> Iterator[Optional[Path]]:
    """Create a file in the folder that no other disk has, for the duration of the block; yield None if that fails."""
    path = checkpoints / (secrets.token_hex(16) + _PARTIAL)  # a killed process leaves it to `new_checkpoint`
    try:
        files.make_folder(checkpoints)  # as `new_checkpoint`
        path.touch(exist_ok=False)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def new_checkpoint(checkpoints: Path, update: int) -> Iterator[Path]:
    """Yield a temporary folder for the files of a checkpoint; at the end of the block it becomes the latest one.

    The block ends with `write_manifest`. A checkpoint of the same update is replaced.

    Raises:
        OSError: the file system's own, also from the block. Partial files are removed.
    """
    files.make_folder(checkpoints)
    _remove_leftovers(checkpoints)
    target, latest = checkpoint_path(checkpoints, update), checkpoints / LATEST
    partial, partial_latest = (path.with_name(path.name + _PARTIAL) for path in (target, latest))
    try:
        files.make_folder(partial)
        yield partial
        # A full disk is found here: once the checkpoint has its name, it counts.
        with files.new_file(partial_latest) as file:
            file.write(_latest_line(target))
        if target.exists():  # the run was resumed from an older checkpoint and reaches this update again
            files.remove_folder(target)
        files.rename_folder(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            _remove_leftovers(checkpoints)
        raise
    files.rename_file(partial_latest, latest)


def new_file(partial: Path, name: str) -> ContextManager[files.NewFile]:
    """Create a file in the folder of `new_checkpoint`; it is flushed to disk at the end of the block."""
    return files.new_file(partial / name)


def write_manifest(partial: Path, manifest: Manifest) -> None:
    """Write the manifest of a new checkpoint, after all its other files."""
    text = manifest.to_json()
    for name, content in ((MANIFEST, text), (MANIFEST_SHA256, sha256_line(text))):
        with new_file(partial, name) as file:
            file.write(content)


def remove_old(checkpoints: Path, kept: Retention) -> None:
    """Remove the checkpoints that are not kept."""
    readable, _ = list_checkpoints(checkpoints)
    for old in checkpoints_to_remove(readable, kept):
        files.remove_folder(old.path)


def _remove_leftovers(checkpoints: Path) -> None:
    """Remove the temporary files and folders of an interrupted `new_checkpoint`."""
    for left in checkpoints.iterdir():
        if left.suffix in (_PARTIAL, _REMOVED):
            if left.is_dir():
                shutil.rmtree(str(left), ignore_errors=True)
            else:
                left.unlink()


def _latest_line(path: Path) -> bytes:
    """The content of `LATEST` for a checkpoint."""
    return f"{path.name}\n".encode()


def _verify_hash(path: Path, name: str, record: FileRecord) -> None:
    """Check the hash of a file of a checkpoint. CheckpointDamaged if it does not match or the file cannot be read."""
    try:
        found = format.digest_of_file(path / name, record.algorithm)
    except OSError as error:
        raise CheckpointDamaged(str(path / name), error.strerror or str(error)) from None
    if found != record.digest:
        raise CheckpointDamaged(str(path), f"the {format.TITLES[record.algorithm]} of {name} does not match {MANIFEST}")
