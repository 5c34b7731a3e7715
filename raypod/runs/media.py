"""The pictures and texts that callbacks log: the folder `media` of a run, which the trackers follow."""

from __future__ import annotations

import collections
import hashlib
import re
from pathlib import Path
from typing import Any, Callable, Counter, Dict, Iterable, List, NamedTuple, Optional, Tuple

from typing_extensions import Literal

from raypod.plan.layout import MEDIA
from raypod.runs.callback import Sink
from raypod.runs.metrics import keep_until
from raypod.system.files import AppendOnlyFile, make_folder, replace_file, strict_json

LIST = "media.jsonl"  # in the folder
Kind = Literal["image", "text"]


class Media(NamedTuple):
    """A picture or a text of a run."""

    kind: Kind
    name: str
    update: int  # the number of finished updates
    content: bytes  # a PNG, or the text in UTF-8


class LoggedMedia(NamedTuple):
    """A picture or a text in a run folder."""

    kind: Kind
    name: str
    update: int
    path: Path  # of the PNG or the text file


def logged_media(run_dir: Path, records: Iterable[Dict[str, Any]]) -> List[LoggedMedia]:
    """Return what lines of the list name. Lines of something else are skipped."""
    found = []
    for record in records:
        kind, name, update, file = (record.get(key) for key in ("kind", "name", "update", "file"))
        if kind in ("image", "text") and isinstance(update, int) and isinstance(file, str) and Path(file).name == file:
            found.append(LoggedMedia(kind, str(name), update, run_dir / MEDIA / file))
    return found


class MediaFolder(Sink):
    """Writes the folder. It exists only in runs that log something. Its copy has nothing: no run continues from it."""

    def __init__(self, run_dir: Path, first_update: int, warn: Callable[[str], None]) -> None:
        """Keep what was logged up to `first_update`, from which a resumed run continues."""
        self._folder, self._warn, self._has_warned = run_dir / MEDIA, warn, False
        self._list: Optional[AppendOnlyFile] = None
        self._names: Counter[Tuple[str, str, int]] = collections.Counter()  # kind, name, update
        self.drop_after(first_update or -1)

    def add(self, media: Media) -> None:
        """Write a picture or a text. If the disk fails, it is lost, and the run has a warning."""
        suffix = {"image": "png", "text": "txt"}[media.kind]
        self._names[media[:3]] += 1
        number = self._names[media[:3]]  # of those with the same name after the same update
        file = f"{media.update:08d}-{_file_name(media.name)}{f'-{number}' if number > 1 else ''}.{suffix}"
        try:
            make_folder(self._folder)
            replace_file(self._folder / file, media.content)
            if self._list is None:
                self._list = AppendOnlyFile(self._folder / LIST, self._warn)
                self._list.end_line()
        except OSError as error:
            if not self._has_warned:
                self._warn(f"cannot write {self._folder / file}: {error.strerror}")
            self._has_warned = True
            return
        line = {"update": media.update, "kind": media.kind, "name": media.name, "file": file}
        self._list.write_line(strict_json(line))

    def drop_after(self, update: int) -> None:
        """See `Sink.drop_after`. The files stay until they are written again."""
        self._names.clear()
        if (self._folder / LIST).is_file():
            self.close()
            keep_until(self._folder / LIST, update)

    def sync(self) -> None:
        if self._list is not None:
            self._list.sync()

    def close(self) -> None:
        before, self._list = self._list, None
        if before is not None:
            before.close()


def _file_name(name: str) -> str:
    """Return a name as a part of a file name: names that differ have different ones."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
