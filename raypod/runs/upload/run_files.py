"""The mirrored files of a run folder, each with the part that is complete. `plan/layout.py` names them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import BinaryIO, Dict, Iterator, NamedTuple, Optional

from raypod.plan import layout
from raypod.plan.layout import CHECKPOINTS
from raypod.runs.upload.index import Content

LATEST = f"{CHECKPOINTS}/LATEST"
_CHUNK_BYTES = 1 << 20


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
            found[name] = version(run_dir / name)
    return found


def version(path: Path) -> Version:
    """Return the version of a file. FileNotFoundError if there is none."""
    facts = path.stat()
    return Version(facts.st_ino, facts.st_size, facts.st_mtime_ns)


class Snapshot:
    """The bytes that a file has when it is opened: it may grow, be replaced or be removed meanwhile."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self._file: BinaryIO = path.open("rb")
        facts = os.fstat(self._file.fileno())
        self.version = Version(facts.st_ino, facts.st_size, facts.st_mtime_ns)

    @property
    def size_bytes(self) -> int:
        """The number of bytes."""
        return self.version.size_bytes

    def content(self) -> Content:
        """Return the size and hash of the bytes."""
        digest, left = hashlib.sha256(), self.size_bytes
        self._file.seek(0)
        while left:
            chunk = self._file.read(min(_CHUNK_BYTES, left))
            if not chunk:
                break
            digest.update(chunk)
            left -= len(chunk)
        return Content(self.size_bytes - left, digest.hexdigest())

    def reader(self) -> BinaryIO:
        """Return the open file at its beginning."""
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def opened(path: Path) -> Optional[Snapshot]:
    """Return a snapshot of a file; None if there is none."""
    try:
        return Snapshot(path)
    except FileNotFoundError:
        return None
