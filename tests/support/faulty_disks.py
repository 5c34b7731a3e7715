"""Disks that fail at a chosen operation, as if the process were killed or the disk full, or after some bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import pytest

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


class Killed(BaseException):
    """The process is killed: nothing it would have done afterwards happens."""


class FaultyDisk:
    """Counts the operations of `os` that change or flush a disk; from number `fails_at` on they fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: Optional[int] = None, *, full: bool = False) -> None:
        self.count, self._fails_at, self._full = 0, fails_at, full
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **keywords)
            if self._full and name not in ("write", "mkdir", "open"):
                return real(*arguments, **keywords)  # a full disk can still remove and rename
            self.count += 1
            if self._fails_at is None or self.count < self._fails_at:
                return real(*arguments, **keywords)
            if name == "write" and self.count == self._fails_at:
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if self._full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise Killed

        return operation


class FullDisk:
    """`os.write` writes `free_bytes` more bytes and then fails; None: any number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes: Optional[int] = None
        self._real = os.write
        monkeypatch.setattr(os, "write", self._write)

    def _write(self, descriptor: int, data: Any) -> int:
        if self.free_bytes is None:
            return self._real(descriptor, data)
        if self.free_bytes <= 0:  # several threads may have taken the last bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._real(descriptor, bytes(data)[: self.free_bytes])
        self.free_bytes -= written
        return written


class FlushedFiles:
    """Remembers which files `os.fsync` has flushed: a loss of power keeps their content, and may empty any other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: Dict[int, int] = {}
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        self._sizes[facts.st_ino] = facts.st_size

    def size_of(self, path: Path) -> Optional[int]:
        """Return how many bytes of a file have been flushed; None if it was not."""
        return self._sizes.get(path.stat().st_ino)

    def survive(self, path: Path) -> bool:
        """Return whether a file has its present content, and its name, after a loss of power."""
        return self.size_of(path) == path.stat().st_size and path.parent.stat().st_ino in self._sizes
