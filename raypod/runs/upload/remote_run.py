"""Read a run from a remote storage: everything is verified; commands get a local copy of its small files.

The tensors of a checkpoint are copied when a command needs them. The copies are removed when the process ends.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

from raypod.errors import CheckpointDamaged, ConfigError, RunError
from raypod.plan import layout, resolve
from raypod.plan.config import MANIFEST
from raypod.plan.layout import CHECKPOINTS
from raypod.runs.upload import remote_index
from raypod.runs.upload.remote_index import Content, Index
from raypod.system.command_line import show
from raypod.system.files import replace_file
from raypod.system.remote.backends import check_scheme
from raypod.system.remote.errors import describe
from raypod.system.remote.store import Store
from raypod.system.retries import growing, retried
from raypod.system.urls import RunUrl, check_url, is_url, run_url
from raypod.training.checkpoint import format, storage
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.storage import MANIFEST_SHA256

_ATTEMPTS, _FIRST_WAIT_S, _MOST_WAIT_S = 5, 0.5, 5.0
_REREADS = 3  # if a file was replaced after its index was read
_NOT_REPEATED = (FileNotFoundError, PermissionError, CheckpointDamaged, ConfigError)
_PARTIAL = ".partial"

T = TypeVar("T")


class RemoteRun:
    """A run on a remote storage, or one checkpoint of it.

    The methods raise ConfigError if there is nothing to read or no permission, and RunError if the storage cannot be
    reached.
    """

    def __init__(self, url: str, setting: str) -> None:
        """`setting` begins error messages, as in `--resume`. ConfigError if the URL cannot be used."""
        url = check_url(url, setting)
        check_scheme(url, setting, writes=False)
        self.url: RunUrl = run_url(url)
        self._setting, self._given = setting, url
        self._store = Store(self.url.run)

    def close(self) -> None:
        """End the connection; the next method connects again."""
        self._store.disconnect()

    def read_index(self) -> Optional[Index]:
        """Return the index; None if it is missing or damaged."""
        text = self._read(remote_index.NAME)
        try:
            return None if text is None else remote_index.from_json(text)
        except ValueError:
            return None

    def fetch_files(self, folder: Path, wanted: Callable[[str], bool]) -> Tuple[Optional[Index], List[str]]:
        """Copy the files of the index for which `wanted` is true into a folder.

        Returns:
            The index, and a message about each file that is missing or damaged, which is then not in the folder.
        """
        found = self.read_index()
        if found is None:
            return None, [
                f"{remote_index.NAME} on {self.url.run} is missing or damaged: only its checkpoints can be used"
            ]
        messages = []
        for name in sorted(filter(wanted, found.files)):
            if not remote_index.is_safe(name):
                messages.append(f"{remote_index.NAME} on {self.url.run} has the wrong name {name!r}")
            elif not self._fetch_file(folder, name, found.files[name]):
                messages.append(f"{name} on {self.url.run} is missing or damaged, and is not used")
        return found, messages

    def fetch_manifests(self, folder: Path) -> List[str]:
        """Copy the manifests of the checkpoints into the folder of a run; return messages about damaged ones."""
        only = self.url.checkpoint
        names = self._repeated(lambda: self._store.list_folder(CHECKPOINTS)) or {}
        messages = []
        for name in [name for name, size in names.items() if size is None and only in (None, name)]:
            path = storage.checkpoints_folder(folder) / name
            contents = [self._read(f"{CHECKPOINTS}/{name}/{file}") for file in (MANIFEST, MANIFEST_SHA256)]
            if contents[0] is None:
                continue  # it is being uploaded, or its upload was interrupted: it is absent
            path.mkdir(parents=True)
            for file, content in zip((MANIFEST, MANIFEST_SHA256), contents):
                (path / file).write_bytes(content or b"")
            try:
                storage.read_manifest(path)
            except CheckpointDamaged as error:
                messages.append(str(error).replace(str(folder), self.url.run))
        return messages

    def fetch_checkpoint(self, checkpoint: Checkpoint, target: Path) -> None:
        """Copy the files of a checkpoint into a folder that exists, and verify all of them.

        `checkpoint` is one of `fetch_manifests`. CheckpointDamaged if a file is missing or not as the manifest says.
        """
        name = checkpoint.path.name
        for file, record in checkpoint.manifest.files.items():
            if Path(file).name != file:
                raise CheckpointDamaged(f"{self.url.run}/{CHECKPOINTS}/{name}", f"{file!r} is no file of a checkpoint")
            self._download(f"{CHECKPOINTS}/{name}/{file}", target / file, record.size_bytes + 1)
        for file in (MANIFEST, MANIFEST_SHA256):
            if target != checkpoint.path:
                replace_file(target / file, (checkpoint.path / file).read_bytes())
        try:
            storage.verify(Checkpoint(target, checkpoint.manifest))
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{self.url.run}/{CHECKPOINTS}/{name}", error.cause) from None

    def missing(self) -> ConfigError:
        """Return the error that there is no such run."""
        what = "run" if self.url.checkpoint is None else "checkpoint"
        return ConfigError(f"{self._setting} {self._given}: there is no such {what} on the storage")

    def _read(self, name: str) -> Optional[bytes]:
        return self._repeated(lambda: self._store.read(name))

    def _fetch_file(self, folder: Path, name: str, contents: Sequence[Content]) -> bool:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + _PARTIAL)
        for _ in range(_REREADS):
            most_bytes = max(each.size_bytes for each in contents) + 1
            if self._download(name, partial, most_bytes) and _content_of(partial) in contents:
                partial.replace(target)
                return True
            newer = self.read_index()  # the run may go on
            if newer is None or newer.files.get(name, []) == list(contents):
                break
            contents = newer.files.get(name, [])
            if not contents:
                break
        if partial.exists():
            partial.unlink()
        return False

    def _download(self, name: str, target: Path, most_bytes: int) -> bool:
        """Return whether there is the file; one of another size is found by its hash."""

        def download() -> bool:
            try:
                self._store.download(name, target, most_bytes)
            except FileNotFoundError:
                target.unlink()
                return False
            return True

        return self._repeated(download)

    def _repeated(self, action: Callable[[], T]) -> T:
        try:
            return retried(action, growing(_FIRST_WAIT_S, _MOST_WAIT_S), self._reconnects, _ATTEMPTS)
        except PermissionError as error:
            raise ConfigError(f"{self._setting} {self._given}: no permission: {describe(error)}") from None
        except FileNotFoundError:
            raise self.missing() from None
        except Exception as error:  # noqa: BLE001 - a storage library can raise anything
            raise RunError(f"{self._setting} {self._given}: the storage cannot be read: {describe(error)}") from None

    def _reconnects(self, error: Exception) -> bool:
        """Return whether a request that failed is repeated, on a new connection."""
        if isinstance(error, _NOT_REPEATED):
            return False
        self._store.disconnect()
        return True


def _content_of(path: Path) -> Content:
    return Content(path.stat().st_size, format.digest_of_file(path, format.SHA256))


_WANTED = (*layout.names("resume"), layout.SUMMARY)


class Snapshot(NamedTuple):
    """A copy of a run: its folder has the name of the run. `run_id` is None if it is not known."""

    run: RemoteRun
    folder: Path
    run_id: Optional[str]


_snapshots: Dict[str, Snapshot] = {}  # by folder


def take(url: str, setting: str) -> Snapshot:
    """Copy the small files and the manifests of a run, or the manifest of one checkpoint, and warn about damages.

    Raises:
        ConfigError: there is no such run, or the URL cannot be used.
        RunError: the storage cannot be reached.
    """
    run = RemoteRun(url, setting)
    parent = Path(tempfile.mkdtemp(prefix="raypod-remote-"))
    atexit.register(shutil.rmtree, str(parent), ignore_errors=True)
    folder = parent / run.url.name
    folder.mkdir()
    messages = run.fetch_manifests(folder)
    checkpoints, damaged = storage.list_checkpoints(storage.checkpoints_folder(folder))
    if run.url.checkpoint is not None and not checkpoints and not damaged:
        raise run.missing()
    found, more = run.fetch_files(folder, lambda name: name in _WANTED)
    if found is None and not checkpoints:
        raise run.missing()
    run.close()
    for message in [*messages, *more]:
        show(f"raypod: warning: {message}", sys.stderr)
    snapshot = Snapshot(run, folder, found.run_id if found else None)
    _snapshots[str(folder)] = snapshot
    return snapshot


def take_resumed(resume: Optional[str]) -> None:
    """Copy the run that `--resume` names, if that is a URL: `resolve.run_folder_of` returns the copy from then on."""
    if resume is not None and is_url(resume):
        snapshot = take(resume, "--resume")
        resolve.remote_runs[resume.rstrip("/")] = snapshot.folder


def of_resume(resume: str) -> Snapshot:
    """Return the copy that `take_resumed` has made."""
    return _snapshots[str(resolve.remote_runs[resume])]


def local_folder(where: Union[str, Path], setting: str) -> Path:
    """Return the path of a run or checkpoint; for a URL that of a copy. Errors are those of `take`."""
    text = str(where)
    if not is_url(text):
        return Path(where)
    snapshot = take(text, setting)
    name = snapshot.run.url.checkpoint
    return snapshot.folder if name is None else storage.checkpoints_folder(snapshot.folder) / name


def is_copy(folder: Path) -> bool:
    """Return whether a run folder is a copy of a remote one."""
    return str(folder) in _snapshots


def shown(path: Path) -> str:
    """Return a path; in a copy the URL of what it is a copy of."""
    for folder, snapshot in _snapshots.items():
        if Path(folder) in path.parents:
            return f"{snapshot.run.url.run}/{path.relative_to(folder).as_posix()}"
    return str(path)


def complete(checkpoint: Path) -> None:
    """Copy the tensors of a checkpoint of a copy, and verify them. Does nothing for any other path.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    snapshot = _snapshots.get(str(checkpoint.parent.parent))
    if snapshot is None:
        return
    try:
        snapshot.run.fetch_checkpoint(storage.read_manifest(checkpoint), checkpoint)
    except CheckpointDamaged as error:
        raise ConfigError(str(error)) from None
    finally:
        snapshot.run.close()
