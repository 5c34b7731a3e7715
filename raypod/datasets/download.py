"""Fetches the archive of a data set where `--download` asks for it, once for all processes that share the folder."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from raypod.errors import ConfigError
from raypod.file_lock import locked

_SILENCE_S = 60  # without a byte from the server
_PIECE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published .tar.gz: where it is, its MD5 sum, and the folder that it holds."""

    url: str
    md5: str
    folder: str

    @property
    def name(self) -> str:
        """Of the file."""
        return self.url.rpartition("/")[2]


def download(archive: Archive, root: Path, timeout_s: float) -> None:
    """Make `root`/`archive.folder`, whole or not at all, unless it is there.

    Raises:
        ConfigError: the server cannot be reached, sends something else, or `root` cannot be written.
        WaitTimedOut: another process downloads for longer than `timeout_s` (`run.start_timeout_s`).
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{archive.name}.lock", timeout_s, "run.start_timeout_s"):
            if not (root / archive.folder).is_dir():
                _fetch(archive, root)
    except (OSError, tarfile.TarError) as error:  # urllib's errors are OSErrors
        raise ConfigError(
            f"--download: cannot get {archive.url} ({error}); where there is no network, copy the file here "
            f"yourself and unpack it in {root}"
        ) from None


def _fetch(archive: Archive, root: Path) -> None:
    sys.stderr.write(f"downloading {archive.url} to {root}\n")
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=str(root)))
    try:
        file = partial / archive.name
        with urllib.request.urlopen(archive.url, timeout=_SILENCE_S) as source, file.open("wb") as target:
            digest = _copy(source, target)
        if digest != archive.md5:
            raise OSError(f"its MD5 sum is {digest} and should be {archive.md5}")
        with tarfile.open(str(file)) as packed:
            options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.8.17
            packed.extractall(str(partial), **options)
        (partial / archive.folder).rename(root / archive.folder)
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)


def _copy(source: Any, target: Any) -> str:
    """Copy all bytes; their MD5 sum."""
    digest = hashlib.md5()
    for piece in iter(lambda: source.read(_PIECE_BYTES), b""):
        digest.update(piece)
        target.write(piece)
    return digest.hexdigest()
