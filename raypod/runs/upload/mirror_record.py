"""`storage.json` of a run folder: the identity of the run, and how far it is mirrored. It holds no credentials."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Dict, Tuple

from raypod.plan.layout import EVENTS, STORAGE, SUMMARY
from raypod.system.companion import read_state
from raypod.system.files import parse_json, replace_file, strict_json

MOST_LINE_BYTES = 1 << 16  # of the first line of an event log


@dataclasses.dataclass(frozen=True)
class MirrorRecord:
    """The content of the file; the counts are those of the last start of the run.

    Attributes:
        run_id: identifies the run over all its resumes, also on other hosts; "" if it has not been mirrored, or the
            file was lost: then the storage decides, see `is_run_of`.
        place: the URL at which this run was found or begun; "" if the storage has not answered yet.
        resumed: the URL with which the run was to be resumed last on this host; "" if it was not.
        resumed_generation: the newest one in the folder then, which the run that has begun from there exceeds.
        checkpoints, files: number of uploads.
        uploaded_bytes: of the uploads.
        failures: attempts that failed and were repeated.
        skipped_checkpoints: checkpoints that were removed on this host before they could be uploaded.
        pending: names of what is not on the storage.
        error: why the mirror fails at the moment.
        last_error: the last reason for a failure.
        is_complete: everything is on the storage, and the run has ended.
    """

    run_id: str = ""
    place: str = ""
    resumed: str = ""
    resumed_generation: int = 0
    checkpoints: int = 0
    files: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    skipped_checkpoints: int = 0
    pending: Tuple[str, ...] = ()
    error: str = ""
    last_error: str = ""
    is_complete: bool = False

    def at_start(self) -> MirrorRecord:
        return MirrorRecord(self.run_id, self.place, self.resumed, self.resumed_generation)

    def summary(self, url: str) -> Dict[str, Any]:
        """Return the entry `storage` of `summary.json`."""
        counts = ("checkpoints", "files", "uploaded_bytes", "failures", "skipped_checkpoints")
        return {
            "url": url,
            **{name: getattr(self, name) for name in counts},
            "not_mirrored": list(self.pending),
            "last_error": self.last_error,
        }


def read(run_dir: Path) -> MirrorRecord:
    """Return the content of the file; that of a new run without a readable one."""
    return read_state(run_dir / STORAGE, MirrorRecord())


def is_run_of(run_dir: Path, log: bytes) -> bool:
    """Return whether an event log, of which `log` is the beginning, is that of the run in a folder.

    Its first line has the time and the process of the first start, and is not changed by later ones.
    """
    own, line = b"", log.partition(b"\n")[0]
    with contextlib.suppress(OSError), (run_dir / EVENTS).open("rb") as file:
        own = file.readline(MOST_LINE_BYTES).rstrip(b"\n")
    return line == own and b"process_started" in line


def add_to_summary(run_dir: Path, found: MirrorRecord, url: str) -> None:
    """Set the entry `storage` of `summary.json`. OSError or ValueError if the file cannot be read or written."""
    path = run_dir / SUMMARY
    content = {**parse_json(path.read_text()), "storage": found.summary(url)}
    replace_file(path, (strict_json(content, indent=2) + "\n").encode())
