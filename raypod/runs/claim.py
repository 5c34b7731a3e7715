"""Claim a run folder: create it, or enter the folder of an earlier run, and hold its lease while the run uses it.

A command that ends with a user's mistake before the first update of its run, or in any way before the files of its run
are written, leaves nothing that was not there before.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Dict, List, Optional, Set

from raypod.errors import ConfigError, LeaseHeld, LeaseLost, RaypodError, UserError
from raypod.plan import layout
from raypod.plan.config import Config
from raypod.plan.layout import CHECKPOINTS, LOGS
from raypod.runs import lease, run_folder, run_state
from raypod.runs.lease import Log
from raypod.system.files import create_folder, create_numbered_folder, remove_empty, replace_file

_REPLACED = layout.names("undo")
_OF_RUNNING = [file.name for file in layout.TABLE if file.name not in (*_REPLACED, CHECKPOINTS, LOGS)]


class Claim:
    """A claimed run folder. Leaving the context ends the claim.

    If the context is left by an exception before `note_written`, or by a UserError before `keep` was called, the folder
    is restored to what it was before.
    """

    def __init__(self, folder: Path, held: lease.Lease, created: List[Path], restores: bool = True) -> None:
        """`created` holds the folders that were created for the claim, `folder` last if it is one of them.

        Without `restores`, another process restores the folder if necessary.
        """
        self.folder, self.lease = folder, held
        self._created = created
        self._before: Dict[str, bytes] = {}
        for name in _REPLACED:
            with contextlib.suppress(FileNotFoundError):
                self._before[name] = (folder / name).read_bytes()
        self._new = [folder / name for name in _OF_RUNNING if not (folder / name).exists()]
        self._logs: Optional[Set[Path]] = set((folder / LOGS).iterdir()) if (folder / LOGS).is_dir() else None
        self._added: List[Path] = []
        self._is_written = self._is_kept = not restores
        self._is_discarded = self._is_handed_over = False

    def note_written(self) -> None:
        """Note that the folder is a run folder by now, from which the same command continues."""
        self._is_written = True

    def keep(self) -> None:
        """Keep what the run has written: it trains."""
        self._is_kept = True
        with contextlib.suppress(OSError):  # the leases of earlier runs have no effect
            self.lease.remove_ended()

    def add(self, path: Path) -> None:
        """Note a file or folder that was put into the folder for the run, and is removed if the folder is restored."""
        self._added.append(path)

    def hand_over(self, pid: int) -> None:
        """Hand the claim over to a child process, which adopts it: leaving the context does not end it.

        Raises:
            ConfigError: the lease cannot be written.
        """
        try:
            self.lease.hand_over(pid)
        except OSError as error:
            raise ConfigError(f"cannot write into the run folder {self.folder}: {error.strerror}") from None
        self._is_handed_over = True

    def take_back(self, discard: bool) -> None:
        """End the claim of a child process that has ended; `discard` restores the folder."""
        self._is_handed_over, self._is_discarded = False, discard

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        if self._is_handed_over:
            self.lease.leave()
            return
        is_incomplete = error is not None and not self._is_written and not isinstance(error, LeaseLost)
        is_discarded = self._is_discarded or is_incomplete or (isinstance(error, UserError) and not self._is_kept)
        if is_discarded:
            with contextlib.suppress(OSError):  # the disk is full or lost: the error that ends the command counts
                self._restore()
        self.lease.release()
        if is_discarded:
            remove_empty(self._created)

    def _restore(self) -> None:
        for path in self._added:
            if not path.is_dir():
                path.unlink(missing_ok=True)
        remove_empty(sorted(path for path in self._added if path.is_dir()))
        for name in _REPLACED:
            path = self.folder / name
            if name in self._before and path.read_bytes() != self._before[name]:
                replace_file(path, self._before[name])
            elif name not in self._before and path.exists():
                path.unlink()
        for path in self._new:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        remove_empty([self.folder / CHECKPOINTS])
        logs = self.folder / LOGS
        for path in set(logs.iterdir()) - (self._logs or set()) if logs.is_dir() else ():
            path.unlink()
        if self._logs is None:
            remove_empty([logs])


def claim(config: Config, run_dir: str, take_over: bool, log: Log) -> Claim:
    """Claim the run folder of a config: atomically, among all processes on all hosts that share its disk.

    Args:
        config: the config, whose run folder exists only if it names it (`run.run_dir`), or resumes in it.
        run_dir: the folder that `run_folder.choose` returned. If the config does not name it, and it exists, a number
            is appended.
        take_over: end a run that uses the folder.
        log: prints lines about waits.

    Raises:
        LeaseHeld: another run uses the folder.
        ConfigError: the folder cannot be created, or it has other files and is no run folder.
    """
    folder, created = Path(run_dir), []
    try:
        if run_folder.is_named(config, run_dir):
            try:
                created = create_folder(folder)
            except FileExistsError:
                run_folder.check_is_run_folder(folder, config)
        else:
            created = create_numbered_folder(folder)
            folder = created[-1]
        return _acquire(folder, created, take_over, log)
    except RaypodError:
        remove_empty(created)
        raise
    except OSError as error:
        remove_empty(created)
        raise ConfigError(f"cannot write into the run folder {folder}: {error.strerror}") from None


def adopt(run_dir: str, owner: str, log: Log) -> Claim:
    """Return the claim that the parent of this process has handed over. The parent restores the folder if necessary.

    Raises:
        LeaseLost: another process has taken over.
        ConfigError: the folder cannot be read.
    """
    folder = Path(run_dir)
    try:
        return Claim(folder, lease.adopt(folder, owner, log), [], restores=False)
    except OSError as error:
        raise ConfigError(f"cannot read the run folder {folder}: {error.strerror}") from None


def _acquire(folder: Path, created: List[Path], take_over: bool, log: Log) -> Claim:
    hint = (
        f"raypod attach|stop {folder} on that host shows its output or ends it; --take-over ends it and continues here"
    )
    held = lease.acquire(folder, hint, take_over, log)
    try:
        state = run_state.read(folder)
        if state is not None and held.is_first and not take_over and state.may_be_running:
            holder = f"pid {state.pid} on host {state.host}, as {layout.STATE} says, which has no lease"
            raise LeaseHeld(str(folder), holder, hint)
        return Claim(folder, held, created)
    except (OSError, LeaseHeld):
        held.release()
        raise
