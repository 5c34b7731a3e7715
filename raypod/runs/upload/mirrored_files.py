"""Mirror the files of a run and its checkpoints.

A file is replaced as a whole when it has changed; `plan/layout.py` names the mirrored ones. A checkpoint is complete on
the storage or absent, and its manifest comes last.

The storage is listed before each upload, so that objects that someone has removed or truncated are found. A pod that
was cut off may still upload when another one has the place: whatever is removed or replaced was listed before, and then
this process was the writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from raypod.errors import CheckpointDamaged
from raypod.plan import layout
from raypod.plan.config import MANIFEST
from raypod.plan.layout import CHECKPOINTS
from raypod.runs.upload.remote_index import Content, RemoteIndex
from raypod.system.files import FilePart
from raypod.system.remote.errors import StorageError
from raypod.system.remote.store import Store
from raypod.training.checkpoint import storage
from raypod.training.checkpoint.format import Checkpoint, FileRecord, Retention, checkpoints_to_remove
from raypod.training.checkpoint.storage import MANIFEST_SHA256

LATEST = f"{CHECKPOINTS}/{storage.LATEST}"  # the file that names the newest checkpoint


class Version(NamedTuple):
    """What tells two states of a file apart without reading it."""

    inode: int
    size_bytes: int
    modified_ns: int


def names(run_dir: Path) -> Iterator[str]:
    """Yield the names of the files that are mirrored and exist, without `summary.json`, which comes last."""
    for name in layout.names("resume", "mirror"):
        if (run_dir / name).is_file():
            yield name
    for folder in layout.MIRRORED_FOLDERS:
        for path in sorted((run_dir / folder).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix not in (".partial", ".lock"):
                yield path.relative_to(run_dir).as_posix()


def versions(run_dir: Path) -> Dict[str, Version]:
    """Return the versions of the files of `names`."""
    found = {}
    for name in names(run_dir):
        with contextlib.suppress(FileNotFoundError):
            found[name] = _version_in((run_dir / name).stat())
    return found


def _version_in(facts: os.stat_result) -> Version:
    return Version(facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _content_of(part: FilePart) -> Content:
    """Return the size and hash of what can be read of it."""
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in part.chunks():
        digest.update(chunk)
        size_bytes += len(chunk)
    return Content(size_bytes, digest.hexdigest())


class MirroredFiles:
    """Uploads the files of a run folder that have changed.

    Attributes:
        uploads: how many files were uploaded.
        damaged: errors of files of this host that cannot be read and were passed over, by their names.
    """

    def __init__(self, run_dir: Path, store: Store, index: RemoteIndex) -> None:
        self._run_dir, self._store, self._index = run_dir, store, index
        self._done: Dict[str, Version] = {}  # what is on the storage
        self.uploads = 0
        self.damaged: Dict[str, OSError] = {}

    def pending(self) -> List[str]:
        """Return the names of the files whose newest version is not on the storage."""
        return [name for name, version in versions(self._run_dir).items() if self._done.get(name) != version]

    def audit(self) -> None:
        """Find files that were removed or truncated on the storage; they are uploaded again."""
        folders = {name.rpartition("/")[0] for name in self._done}
        sizes = {folder: self._store.list_folder(folder) or {} for folder in folders}
        for name, version in list(self._done.items()):
            folder, _, own = name.rpartition("/")
            if sizes[folder].get(own) != version.size_bytes:
                del self._done[name]

    def sync(self, names: Iterable[str]) -> None:
        """Upload files of the run folder; those that do not exist any more, or cannot be read, are skipped.

        Raises:
            PlaceTaken: another run has the place on the storage.
            StorageError: the storage holds something else after the upload.
        """
        with contextlib.ExitStack() as stack:
            files: Dict[str, Tuple[BinaryIO, Version]] = {}
            contents: Dict[str, Content] = {}
            for name in names:
                try:
                    file = stack.enter_context((self._run_dir / name).open("rb"))
                    opened = _version_in(os.fstat(file.fileno()))
                    contents[name], files[name] = _content_of(FilePart(file, opened.size_bytes)), (file, opened)
                except FileNotFoundError:
                    continue
                except OSError as error:  # it must not keep the others, and the checkpoints, from the storage
                    self.damaged[name] = OSError(error.errno, error.strerror, name)
            if not files:
                return
            self._index.check()
            self._index.announce(contents)
            for name, (source, opened) in files.items():
                content = contents[name]
                if self._store.write(name, FilePart(source, content.size_bytes)) != content.sha256:
                    raise StorageError(f"{name} was changed while it was uploaded")
                self._index.confirm(name, content)
                self._done[name] = opened
                self.uploads += 1


Sizes = Dict[str, Optional[int]]  # of the files of a folder
_ATTEMPTS = 5  # to read the two files of a manifest while it is replaced


class _Described(NamedTuple):
    """A checkpoint, and the content of its manifest and of the file with the hash of that."""

    checkpoint: Checkpoint
    manifest: bytes
    hashes: bytes


class MirroredCheckpoints:
    """Uploads the checkpoints of a run folder, the newest first, and removes those that are not kept.

    Attributes:
        uploads: how many checkpoints were uploaded.
        skipped: names of checkpoints that were removed on this host before they could be uploaded.
        damaged: errors of checkpoints of this host that were passed over, by their names. `sync` reads them again.
    """

    def __init__(
        self, run_dir: Path, store: Store, kept: Retention, check_writer: Callable[[], None] = lambda: None
    ) -> None:
        """`check_writer` raises an exception if another process mirrors the run by now."""
        self._folder, self._store, self._kept = storage.checkpoints_folder(run_dir), store, kept
        self._check_writer = check_writer
        self._remote: Dict[str, _Described] = {}
        self._incomplete: Set[str] = set()  # names that were listed, of interrupted uploads
        self._partly: Dict[str, Dict[str, FileRecord]] = {}  # verified files of checkpoints that are not complete
        self._uploaded: Set[str] = set()
        self._announced: Set[str] = set()
        self.uploads = 0
        self.skipped: Set[str] = set()
        self.damaged: Dict[str, CheckpointDamaged] = {}

    def announce(self, name: str) -> None:
        """Note that a checkpoint was saved, so that `skipped` counts it if it is removed before it is uploaded."""
        self._announced.add(name)

    def pending(self) -> List[str]:
        """Return the names of the checkpoints that are to be uploaded, as far as it is known without the storage."""
        return [each.path.name for each in self._missing(self._local())]

    def sync(self) -> None:
        """Upload what is missing, then remove what is not kept and what was left by interrupted uploads."""
        self._list()
        self.damaged = {}
        while True:
            local = self._local()
            missing = self._missing(local)
            self.skipped |= self._announced - {each.path.name for each in local} - self._uploaded - set(self.damaged)
            self._announced &= {*(each.path.name for each in missing), *self.damaged}
            if not missing:
                break
            try:
                self._upload(missing[0])
            except CheckpointDamaged as error:  # it must not keep the others from the storage
                self.damaged[missing[0].path.name] = error
        self._remove_old()

    def _local(self) -> List[Checkpoint]:
        """Return the checkpoints of this host, except those that are known to be damaged."""
        return [each for each in storage.list_checkpoints(self._folder)[0] if each.path.name not in self.damaged]

    def _missing(self, local: List[Checkpoint]) -> List[Checkpoint]:
        return [each for each in self._wanted(local) if not self._is_uploaded(each)]

    def _wanted(self, local: List[Checkpoint]) -> List[Checkpoint]:
        """Return the checkpoints of this host that are kept on the storage, newest first."""
        own = {each.path.name: each for each in local}
        others = [each.checkpoint for name, each in self._remote.items() if name not in own]
        removed = {each.path.name for each in checkpoints_to_remove(_newest_first([*local, *others]), self._kept)}
        return [each for each in local if each.path.name not in removed]

    def _is_uploaded(self, local: Checkpoint) -> bool:
        remote = self._remote.get(local.path.name)
        return remote is not None and remote.checkpoint.manifest == local.manifest

    def _list(self) -> None:
        """Find out which checkpoints are complete on the storage."""
        names = [name for name, size in (self._store.list_folder(CHECKPOINTS) or {}).items() if size is None]
        before, self._remote, self._incomplete = self._remote, {}, set(names)
        for name in names:
            sizes = self._store.list_folder(f"{CHECKPOINTS}/{name}") or {}
            known = before.get(name)
            if known is None or sizes.get(MANIFEST) != len(known.manifest):
                known = self._read(name, sizes)
            if known is not None and _is_complete(known.checkpoint, sizes):
                self._note(known)

    def _read(self, name: str, sizes: Sizes) -> Optional[_Described]:
        """Return a checkpoint of the storage; None if its manifest is missing or damaged."""
        if MANIFEST not in sizes or MANIFEST_SHA256 not in sizes:
            return None
        prefix = f"{CHECKPOINTS}/{name}/"
        manifest, hashes = (self._store.read(prefix + file) or b"" for file in (MANIFEST, MANIFEST_SHA256))
        return _described(Path(name), manifest, hashes)

    def _upload(self, local: Checkpoint) -> None:
        """Upload a checkpoint; skip it if it is removed on this host before its files are open.

        CheckpointDamaged if it is there, and its files differ from its manifest.
        """
        name, remote = local.path.name, self._remote.get(local.path.name)
        with contextlib.ExitStack() as stack:
            opened: Optional[Dict[str, FilePart]] = None
            with storage.unless_removed(local.path):
                own = _read_local(local)
                if remote is not None and remote.checkpoint.manifest.files == own.checkpoint.manifest.files:
                    self._replace_manifest(remote, own)
                    return
                storage.verify(own.checkpoint)
                opened = storage.open_files(own.checkpoint, stack)
            if opened is None:
                return
            prefix = f"{CHECKPOINTS}/{name}/"
            self._check_writer()
            self._remote.pop(name, None)
            for file in (MANIFEST, MANIFEST_SHA256):  # from here on the checkpoint is absent until it is complete
                self._store.remove(prefix + file)
            self._upload_tensors(own.checkpoint, opened)
            self._check_writer()
            self._store.write_bytes(prefix + MANIFEST_SHA256, own.hashes)
            self._store.write_bytes(prefix + MANIFEST, own.manifest)
        self._note(own)
        self._partly.pop(name, None)
        self.uploads += 1

    def _upload_tensors(self, checkpoint: Checkpoint, opened: Dict[str, FilePart]) -> None:
        """Upload the files of a checkpoint, without those that an attempt before has uploaded and verified."""
        folder = f"{CHECKPOINTS}/{checkpoint.path.name}"
        done = self._partly.setdefault(checkpoint.path.name, {})
        sizes = (self._store.list_folder(folder) or {}) if done else {}
        for name, part in opened.items():
            record = checkpoint.manifest.files[name]
            if done.get(name) != record or sizes.get(name) != part.size_bytes:
                self._store.write(f"{folder}/{name}", part)
                done[name] = record

    def _replace_manifest(self, before: _Described, own: _Described) -> None:
        """Replace the manifest as `storage.replace_manifest` does: both hashes are valid meanwhile."""
        prefix = f"{CHECKPOINTS}/{own.checkpoint.path.name}/"
        self._check_writer()
        self._store.write_bytes(prefix + MANIFEST_SHA256, before.hashes + own.hashes)
        self._store.write_bytes(prefix + MANIFEST, own.manifest)
        self._store.write_bytes(prefix + MANIFEST_SHA256, own.hashes)
        self._note(own)

    def _note(self, complete: _Described) -> None:
        name = complete.checkpoint.path.name
        self._remote[name] = complete
        self._uploaded.add(name)
        self._incomplete.discard(name)

    def _remove_old(self) -> None:
        newest_first = _newest_first([each.checkpoint for each in self._remote.values()])
        for name in [old.path.name for old in checkpoints_to_remove(newest_first, self._kept)]:
            self._check_writer()
            del self._remote[name]
            self._discard(name)
        for name in sorted(self._incomplete):
            self._check_writer()
            self._discard(name)

    def _discard(self, name: str) -> None:
        """Remove the files of a checkpoint, the manifest first; what cannot be removed is found the next time."""
        folder = f"{CHECKPOINTS}/{name}"
        with contextlib.suppress(Exception):  # the storage is lost: the caller's error counts, or the next one
            names = self._store.list_folder(folder) or {}
            for file in sorted(names, key=lambda each: each != MANIFEST):
                self._store.remove(f"{folder}/{file}")
            self._store.remove_empty_folder(folder)


def _newest_first(checkpoints: List[Checkpoint]) -> List[Checkpoint]:
    return sorted(checkpoints, key=lambda each: (each.manifest.generation, each.update), reverse=True)


def _is_complete(checkpoint: Checkpoint, sizes: Sizes) -> bool:
    """Return whether all files of a checkpoint are listed with their sizes."""
    return all(sizes.get(name) == record.size_bytes for name, record in checkpoint.manifest.files.items())


def _described(path: Path, manifest: bytes, hashes: bytes) -> Optional[_Described]:
    """Return the checkpoint `path` from the content of its two files; None if they do not match."""
    try:
        return _Described(storage.parse_manifest(path, manifest, hashes), manifest, hashes)
    except CheckpointDamaged:
        return None


def _read_local(local: Checkpoint) -> _Described:
    """Return a checkpoint of this host, whose manifest may be replaced meanwhile. CheckpointDamaged otherwise."""
    for _ in range(_ATTEMPTS):
        manifest, hashes = ((local.path / file).read_bytes() for file in (MANIFEST, MANIFEST_SHA256))
        found = _described(local.path, manifest, hashes)
        if found is not None:  # while the manifest is replaced, the file with the hash has two
            return found._replace(hashes=storage.sha256_line(manifest))
    raise CheckpointDamaged(str(local.path), f"{MANIFEST} does not match {MANIFEST_SHA256}")
