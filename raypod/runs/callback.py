"""What follows a run: the recorders of its files, the display, mirror and trackers, and the callbacks of users."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Optional, TypeVar

from raypod.events import Event, InstanceWarned
from raypod.system.files import AppendOnlyFile

C = TypeVar("C", bound="Callback")


class Callback:
    """Gets the events of a run, in the coordinator's thread, and is a context for as long as the run."""

    def on_event(self, event: Event) -> None:
        """Handle one event."""

    def copy_to(self, folder: Path) -> None:
        """Copy the file that this writes into another run folder. OSError if that fails."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        """End, also by an error."""


class Sink(Callback):
    """A file that grows with the events of a run. Its copy has what its own disk does not take."""

    def drop_after(self, update: int) -> None:
        """Drop what the file has about later updates: they are computed again, with other bits."""

    def sync(self) -> None:
        """Flush everything to the disk, if there is space."""

    def close(self) -> None:
        """Close the file. OSError if something could not be written."""


class LinesSink(Sink):
    """A sink of lines, which are written immediately."""

    _file: AppendOnlyFile

    def sync(self) -> None:
        self._file.sync()

    def copy_to(self, folder: Path) -> None:
        self._file.copy_to(folder / self._file.path.name)

    def close(self) -> None:
        self._file.close()


class UploadTarget(Callback):
    """Keeps a run besides its folder: a URL (`runs/upload/mirror.py`) or other hosts (`runs/upload/copies.py`).

    It gets each checkpoint when it is saved. Nothing that fails there ends or slows the run, which waits for it only at
    its end, for a limited time. A process uploads to a storage, since the library of a storage can hang and hold the
    interpreter's lock; a thread sends to other hosts, since only this process has the connections of the fleet.
    """

    def send_from(self, folder: Path, checkpoint: Path) -> str:
        """Upload a checkpoint of another folder, which has the files of the run, and wait until that is done.

        Returns what a message says after "the state is saved": where, and how the run continues from there; "" if the
        target does not hold the checkpoint.
        """
        raise NotImplementedError


class Reporter(Callback):
    """Shows a run to the user. This one shows nothing except warnings, which go to the logger `raypod`."""

    def on_event(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, InstanceWarned):
            where = f" (instance {event.instance}; its log: {event.log_file})" if event.log_file else ""
            self.warn(f"{event.text}{where}")

    def warn(self, text: str) -> None:
        """Show a warning."""
        logging.getLogger("raypod").warning("%s", text)

    def print_line(self, text: str) -> None:
        """Show a line, for example about a wait."""
        logging.getLogger("raypod").info("%s", text)
