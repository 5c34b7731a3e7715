"""Arrays that are decoded once and then mapped, read-only, by all instances of a host: one copy in its memory.

An entry is a folder of .npy files, written beside its place under a lock and renamed into it, so that it is whole or
not there. Its name says what it was made of; an entry made of older files is dropped when a newer one is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Mapping, Optional

import numpy as np

from raypod.errors import ConfigError
from raypod.host.files import locked
from raypod.plan.config import Config

_FORMAT = "1"  # of the entries: raised when what is written changes

Arrays = Dict[str, np.ndarray]


class Cache:
    """The entries of one data set, made of the files of one folder.

    They lie in `data.cache_dir`; by default beside the data, or in the user's cache folder where that is read-only.
    """

    def __init__(self, config: Config, source: Path) -> None:
        source = source.resolve()
        chosen = config.data.cache_dir
        if chosen is None and not os.access(str(source), os.W_OK):
            chosen = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "raypod")
        parent = source / ".raypod-cache" if chosen is None else Path(chosen).expanduser()
        self._folder = parent / f"{config.data.dataset}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
        self._timeout_s = config.run.start_timeout_s

    def find(self, identity: str) -> Optional[Arrays]:
        """The arrays that were made of what `identity` names, or None.

        Raises:
            ConfigError: a file of the entry is damaged.
        """
        entry = self._folder / identity
        if not entry.is_dir():
            return None
        try:
            return {file.stem: _mapped(file) for file in entry.glob("*.npy")}
        except (OSError, ValueError) as error:
            raise ConfigError(f"the cached data in {entry} is damaged ({error}); remove that folder") from None

    def find_or_make(self, identity: str, make: Callable[[], Mapping[str, np.ndarray]]) -> Arrays:
        """The arrays that `make` gives, which is called once for all processes that share the cache.

        Raises:
            ConfigError: the folder cannot be written.
            WaitTimedOut: another process takes longer than `run.start_timeout_s` to make them.
        """
        found = self.find(identity)
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / "lock", self._timeout_s, "run.start_timeout_s"):
                if self.find(identity) is None:
                    self._write(identity, make())
        except OSError as error:
            raise ConfigError(
                f"cannot write the decoded data to {self._folder} ({error.strerror}); "
                "name a folder for it with --cache-dir"
            ) from None
        made = self.find(identity)
        assert made is not None
        return made

    def _write(self, identity: str, arrays: Mapping[str, np.ndarray]) -> None:
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=str(self._folder)))
        try:
            for name, array in arrays.items():
                np.save(str(partial / f"{name}.npy"), array)
            partial.chmod(0o755)
            partial.rename(self._folder / identity)
        except BaseException:
            shutil.rmtree(str(partial), ignore_errors=True)
            raise
        for old in self._folder.iterdir():
            if old.is_dir() and old.name != identity:
                shutil.rmtree(str(old), ignore_errors=True)  # who has it mapped keeps it


def identity_of(files: Iterable[Path]) -> str:
    """What files hold, as far as their names, sizes and times tell."""
    digest = hashlib.sha256(_FORMAT.encode())
    for file in files:
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _mapped(file: Path) -> np.ndarray:
    mapped: np.ndarray = np.load(str(file), mmap_mode="r", allow_pickle=False)
    return mapped.view(np.ndarray)  # indexing a memmap object costs several times as much


# --- from datasets.download: Fetches the archive of a data set where `--download` asks for it, once for all processes that share the folder.

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
