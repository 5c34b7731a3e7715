"""The index of a run on the storage, as the process that mirrors the run keeps it.

`index.json` says whose run it is, and has the hashes of its files except checkpoints. A file is replaced in two steps:
the index first lists the new content beside the old one, then the file is replaced. So a reader can verify every file,
also if the writer was killed at any point. Checkpoints have manifests instead.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Callable, Dict, List, Optional

from raypod.plan import layout
from raypod.runs.upload.mirror_record import MOST_LINE_BYTES
from raypod.system.files import parse_json
from raypod.system.remote.errors import StorageError
from raypod.system.remote.store import Store

NAME = "index.json"
_FORMAT = 1
_KEPT = 10  # oldest and newest possible contents of a file


@dataclasses.dataclass(frozen=True)
class Content:
    """The size and the SHA-256 of a file."""

    size_bytes: int
    sha256: str


@dataclasses.dataclass
class Index:
    """The content of the file.

    Attributes:
        run_id: identifies the run over all its resumes.
        writer: identifies the process that mirrors the run; another one ends when it finds a new writer.
        files: the contents that a file can have, the newest last.
    """

    run_id: str
    writer: str
    files: Dict[str, List[Content]] = dataclasses.field(default_factory=dict)

    def with_new(self, contents: Dict[str, Content]) -> Index:
        """Return the index with further contents that files can have.

        After a failed upload the remote file may hold the old or any attempted content, so all are kept as valid.
        """
        files = dict(self.files)
        for name, content in contents.items():
            known = [each for each in files.get(name, []) if each != content]
            files[name] = [*known[:_KEPT], *known[_KEPT:][-_KEPT:], content]
        return Index(self.run_id, self.writer, files)

    def to_json(self) -> bytes:
        """Return the JSON that `from_json` parses."""
        return (json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n").encode()


def from_json(text: bytes) -> Index:
    """Parse an index. ValueError for any other content."""
    try:
        content = parse_json(text.decode())
        if content.pop("format") != _FORMAT:
            raise ValueError(f"it is not an index of format {_FORMAT}")
        files = {
            str(name): [Content(int(each["size_bytes"]), str(each["sha256"])) for each in known]
            for name, known in content["files"].items()
        }
        return Index(str(content["run_id"]), str(content["writer"]), files)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{NAME} cannot be parsed ({type(error).__name__}: {error})") from None


def is_safe(name: str) -> bool:
    """Return whether the name of a file stays within the folder of a run."""
    return not any(part in ("", ".", "..") for part in name.split("/"))


class PlaceTaken(StorageError):
    """Raised if another run, or another process of the same run, uses the place on the storage."""


class RemoteIndex:
    """Reads and writes `index.json`, and makes sure that no other run is overwritten.

    Attributes:
        run_id: identifies the run, once `check` has returned.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        writer: str,
        is_known: bool,
        is_own_log: Callable[[bytes], bool] = lambda log: False,
    ) -> None:
        """Read and write nothing yet.

        Args:
            store: the place.
            run_id: identifies the run; "": that of the run on the storage if it has the event log of this one, or new.
            writer: identifies this process.
            is_known: this run was mirrored to the place before, so that a missing index was removed by someone.
            is_own_log: returns whether the beginning of an event log is that of this run.
        """
        self._store, self.run_id, self._writer, self._is_known = store, run_id, writer, is_known
        self._is_own_log = is_own_log
        self._index: Optional[Index] = None
        self._is_writer = False  # the index on the storage says so

    def check(self) -> None:
        """Read the index, and become its writer the first time.

        Raises:
            PlaceTaken: another run has the place, or another process mirrors this one by now.
        """
        text = self._store.read(NAME)
        if text is None:
            if self._index is None and not self._is_known and self._store.list_folder():
                raise PlaceTaken(f"{self._store.url} holds other files; use another --run-dir or --storage-path")
            self.run_id = self.run_id or uuid.uuid4().hex
            found = self._index or Index(self.run_id, self._writer)
        else:
            found = self._parsed(text)
            if not self.run_id and self._is_own_log(self._store.read(layout.EVENTS, MOST_LINE_BYTES) or b""):
                self.run_id = found.run_id
        if found.run_id != self.run_id:
            raise PlaceTaken(f"{self._store.url} holds another run; use another --run-dir or --storage-path")
        if self._is_writer and found.writer != self._writer:
            raise PlaceTaken(f"another process mirrors the run to {self._store.url} by now")
        if not self._is_writer:
            self._index = found = dataclasses.replace(found, writer=self._writer)
            self._write(found)
            self._is_writer = True
        elif text is None:
            self._write(found)

    def announce(self, contents: Dict[str, Content]) -> None:
        """Add new contents of files, before these are uploaded."""
        assert self._index is not None, "the index was read before"
        self._write(self._index.with_new(contents))

    def confirm(self, name: str, content: Content) -> None:
        """Keep only the content that a file has on the storage by now; the next `announce` writes that."""
        assert self._index is not None, "the index was read before"
        self._index.files[name] = [content]

    def _parsed(self, text: bytes) -> Index:
        try:
            return from_json(text)
        except ValueError as error:
            if self._index is not None or self._is_known:  # damaged by someone: it is written again
                return self._index or Index(self.run_id, self._writer)
            raise PlaceTaken(f"{self._store.url}: {error}; use another --run-dir or --storage-path") from None

    def write(self) -> None:
        """Write the index with what was confirmed."""
        assert self._index is not None, "the index was read before"
        self._write(self._index)

    def _write(self, content: Index) -> None:
        self._store.write_bytes(NAME, content.to_json())
        self._index = content
