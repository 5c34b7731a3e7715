"""`index.json` of a run on a remote storage: whose run it is, and the hashes of its files except checkpoints.

A file is replaced in two steps: the index first lists the new content beside the old one, then the file is replaced.
So a reader can verify every file, also if the writer was killed at any point. Checkpoints have manifests instead.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Dict, List, Tuple

from raypod.system.files import parse_json

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
    parts: Tuple[str, ...] = tuple(name.split("/"))
    return bool(name) and not name.startswith("/") and not any(part in ("", ".", "..") for part in parts)
