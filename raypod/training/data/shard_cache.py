"""The folder on a host in which all its processes keep the shards of URLs; its size is bounded.

    XXH3-128                  a shard, or an array of an index, by its checksum
    XXH3-128.BYTES.partial    one of this size that is being downloaded
    XXH3-128.lock             locked by the process that downloads it
    lock                      locked while space is reserved, and while a file gets its final name

A file is complete and verified, or absent. Where space is needed, the files go that were needed longest ago; a process
that has opened one can read it to its end.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Container, Iterator, List, Tuple

from raypod.errors import ConfigError, WaitTimedOut
from raypod.system.files import file_lock
from raypod.system.remote.store import Store
from raypod.system.retries import is_passing
from raypod.training.data.shards import Shard, checksum_of

_NAME = re.compile(r"[0-9a-f]{32}(\.\d+\.partial)?")
_LOCK, _LOCKED, _PARTIAL = "lock", ".lock", ".partial"
_RESERVE_S, _DOWNLOAD_S = 60.0, 24 * 3600.0  # for the locks of other processes; `Downloads.wait` has a limit of its own
_ATTEMPTS = 2  # to download a shard that is damaged


class DamagedShard(Exception):
    """Raised if a shard is damaged where it is stored."""


class ShardCache:
    """The shards on this host.

    Args:
        folder: is created with the first file.
        limit_bytes: of all files together, unless those that one process needs at a time are larger.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def path(self, shard: Shard) -> Path:
        """Return where a shard is, if it is there."""
        return self.folder / shard.xxh3_128

    def has(self, shard: Shard) -> bool:
        """Return whether a shard is there, and note that it is needed."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(str(self.path(shard)))
            return True
        return False

    def received_bytes(self, shard: Shard) -> int:
        """Return how much of a shard has been downloaded so far, by whichever process."""
        for path in (self._partial(shard), self.path(shard)):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    def fetch(self, store: Store, shard: Shard, kept: Container[str] = ()) -> int:
        """Download a shard unless it is there or another process does; return the downloaded bytes.

        Args:
            store: where it is stored.
            kept: checksums of the shards that are not removed to make room.

        Raises:
            DamagedShard: its checksum is wrong, also of a second download.
            ConfigError: the folder cannot be created or written.
            Exception: of the storage library, or OSError of the disk.
        """
        with self._locked(shard):
            if self.has(shard):
                return 0
            partial, found, size = self._partial(shard), "", 0
            try:
                for attempt in range(1, _ATTEMPTS + 1):
                    self._reserve(shard, kept)
                    store.download(shard.file, partial, shard.bytes + 1 if shard.bytes else 1 << 62)
                    found, size = checksum_of(partial), partial.stat().st_size
                    if found == shard.xxh3_128:
                        self._complete(shard)
                        return attempt * size
            finally:
                with contextlib.suppress(FileNotFoundError):
                    partial.unlink()
        sizes = f" ({size} bytes, expected {shard.bytes})" if size < shard.bytes else ""
        raise DamagedShard(
            f"its checksum is {found}, expected {shard.xxh3_128}, also when it is downloaded again{sizes}"
        )

    def remove_abandoned(self) -> None:
        """Remove what processes have left that were killed during a download."""
        for partial in filter(lambda each: _NAME.fullmatch(each.name), self.folder.glob(f"*{_PARTIAL}")):
            lock = self.folder / f"{partial.name.partition('.')[0]}{_LOCKED}"
            with contextlib.suppress(WaitTimedOut, OSError), file_lock(lock, 0, ""):
                partial.unlink()

    @contextlib.contextmanager
    def _locked(self, shard: Shard) -> Iterator[None]:
        """Lock a shard. ConfigError if the folder cannot be created or written."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(0o755, parents=True, exist_ok=True)
                stack.enter_context(file_lock(self.folder / f"{shard.xxh3_128}{_LOCKED}", _DOWNLOAD_S, ""))
            except OSError as error:
                if is_passing(error):
                    raise
                raise ConfigError(
                    f"cannot write shards to {self.folder} ({error.strerror}); choose another folder with --cache-dir"
                ) from None
            yield

    def _partial(self, shard: Shard) -> Path:
        return self.folder / f"{shard.xxh3_128}.{shard.bytes}{_PARTIAL}"

    def _reserve(self, shard: Shard, kept: Container[str]) -> None:
        """Create the empty partial file of a shard, after older shards have been removed to make room for it."""
        with file_lock(self.folder / _LOCK, _RESERVE_S, ""):
            self._partial(shard).touch()
            files = self._files()
            excess = sum(size for _, size, _ in files) - self.limit_bytes
            for _, size, path in sorted(files):
                if excess <= 0:
                    break
                if path.suffix != _PARTIAL and path.name not in kept:
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                    excess -= size

    def _complete(self, shard: Shard) -> None:
        # Locked: whoever lists the files for their sizes would find a shard under neither name.
        with file_lock(self.folder / _LOCK, _RESERVE_S, ""):
            self._partial(shard).rename(self.path(shard))

    def _files(self) -> List[Tuple[float, int, Path]]:
        """Return the time at which each file was needed last, its size, final or so far, and its path.

        What others have put into the folder, as the index of packed data, stays.
        """
        found = []
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name) is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                reserved = int(path.name.split(".")[1]) if path.suffix == _PARTIAL else 0
                found.append((status.st_mtime, max(status.st_size, reserved), path))
        return found
