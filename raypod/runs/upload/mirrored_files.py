"""Mirror the files of a run, except checkpoints: each is replaced as a whole when it has changed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Dict, Iterable, List

from raypod.plan.layout import CHECKPOINTS
from raypod.runs.upload import run_files
from raypod.runs.upload.index import Content
from raypod.runs.upload.remote_index import RemoteIndex
from raypod.runs.upload.run_files import Snapshot, Version
from raypod.system.remote.errors import StorageError
from raypod.system.remote.store import Store


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
        return [name for name, version in run_files.versions(self._run_dir).items() if self._done.get(name) != version]

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
            snapshots: Dict[str, Snapshot] = {}
            contents: Dict[str, Content] = {}
            for name in names:
                try:
                    snapshot = run_files.opened(self._run_dir / name)
                    if snapshot is None:
                        continue
                    stack.callback(snapshot.close)
                    contents[name], snapshots[name] = snapshot.content(), snapshot
                except OSError as error:  # it must not keep the others, and the checkpoints, from the storage
                    self.damaged[name] = OSError(error.errno, error.strerror, name)
            if not snapshots:
                return
            self._index.check()
            self._index.announce(contents)
            for name, snapshot in snapshots.items():
                content = contents[name]
                if self._store.write(name, snapshot.reader(), content.size_bytes) != content.sha256:
                    raise StorageError(f"{name} was changed while it was uploaded")
                self._index.confirm(name, content)
                self._done[name] = snapshot.version
                self.uploads += 1


def latest_of(run_dir: Path) -> List[str]:
    """Return the name of the file that names the newest checkpoint, if there is one."""
    return [run_files.LATEST] if (run_dir / CHECKPOINTS / "LATEST").is_file() else []
