"""The files of a data set: the published archive, and the cache of its decoded arrays.

A cache entry is a folder of .npy files, which all instances of a host map read-only, so that they share one copy in
memory. Entries and archives are written to a temporary folder, flushed to disk and renamed, under a lock: they are
complete or absent, also after a loss of power.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Optional

import numpy as np

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import Config
from raypod.system.files import file_lock, rename_folder, sync_file
from raypod.training.data.arrays import load_mapped

_FORMAT = "2"  # of the entries: increment it when their content changes
_READ_TIMEOUT_S = 60
_CHUNK_BYTES = 1 << 20

Arrays = Dict[str, np.ndarray]


def data_dir(config: Config, content: str) -> Path:
    """Return `data.data_dir`. DataMissing, which says that it must hold `content`, if it is not set."""
    if config.data.data_dir is None:
        raise DataMissing(f"--dataset {config.data.dataset} needs --data-dir: the folder that contains {content}")
    return Path(config.data.data_dir).expanduser()


class Cache:
    """The cache entry of the arrays that are decoded from some files.

    The entry is in `data.cache_dir`; by default next to the data, or in the user's cache folder if the data is
    read-only. Creating an entry deletes the data set's older ones.

    Args:
        source: the folder of the data set.
        files: the files or folders whose names, sizes and modification times identify the content.
    """

    def __init__(self, config: Config, source: Path, files: Iterable[Path]) -> None:
        source = source.resolve()
        chosen = config.data.cache_dir
        if chosen is None and not os.access(str(source), os.W_OK):
            chosen = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "raypod")
        parent = source / ".raypod-cache" if chosen is None else Path(chosen).expanduser()
        self._folder = parent / f"{config.data.dataset}-{hashlib.sha256(os.fsencode(source)).hexdigest()[:8]}"
        self._entry = self._folder / _key(files)
        self._timeout_s = config.run.start_timeout_s

    def read(self, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays; calls `make` if there is no entry. Writes nothing.

        Raises:
            ConfigError: a file of the entry is damaged.
        """
        found = self._find()
        return make() if found is None else found

    def get(self, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays, memory-mapped; `make` is called once for all processes that share the cache.

        Raises:
            ConfigError: the folder cannot be written, or a file of the entry is damaged.
            WaitTimedOut: another process needs more than `run.start_timeout_s` to create the entry.
        """
        found = self._find()
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with file_lock(self._folder / "lock", self._timeout_s, "run.start_timeout_s"):
                if self._find() is None:
                    self._write(make())
        except OSError as error:
            raise ConfigError(
                f"cannot write the decoded data to {self._folder} ({error.strerror}); "
                "choose another folder with --cache-dir"
            ) from None
        made = self._find()
        assert made is not None
        return made

    def _find(self) -> Optional[Arrays]:
        if not self._entry.is_dir():
            return None
        try:
            return {file.stem: load_mapped(file) for file in self._entry.glob("*.npy")}
        except (OSError, ValueError) as error:
            raise ConfigError(f"the cached data in {self._entry} is damaged ({error}); remove that folder") from None

    def _write(self, arrays: Arrays) -> None:
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=str(self._folder)))
        try:
            for name, array in arrays.items():
                np.save(str(partial / f"{name}.npy"), array)
                sync_file(partial / f"{name}.npy")
            partial.chmod(0o755)
            rename_folder(partial, self._entry)
        except BaseException:
            shutil.rmtree(str(partial), ignore_errors=True)
            raise
        for old in self._folder.iterdir():
            if old.is_dir() and old != self._entry:
                shutil.rmtree(str(old), ignore_errors=True)  # existing mappings of its files stay valid


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for file in files:
        found = file.stat()
        digest.update(os.fsencode(f"{file.name} {found.st_size} {found.st_mtime_ns}\n"))
    return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published .tar.gz: its URL, its MD5 checksum, and the folder that it contains."""

    url: str
    md5: str
    folder: str

    @property
    def name(self) -> str:
        """The file name."""
        return self.url.rpartition("/")[2]


def download(archive: Archive, root: Path, timeout_s: float) -> None:
    """Download and unpack the archive to `root`/`archive.folder`, unless that folder exists.

    Raises:
        ConfigError: the download fails, its checksum is wrong, or `root` cannot be written.
        WaitTimedOut: another process downloads for longer than `timeout_s` (`run.start_timeout_s`).
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with file_lock(root / f".{archive.name}.lock", timeout_s, "run.start_timeout_s"):
            if not (root / archive.folder).is_dir():
                _fetch(archive, root)
    except (OSError, EOFError, tarfile.TarError, zlib.error, http.client.HTTPException) as error:  # urllib's: OSErrors
        raise ConfigError(
            f"--download: cannot get {archive.url} ({error}); without network access, copy the file to this host "
            f"and unpack it in {root}"
        ) from None


def _fetch(archive: Archive, root: Path) -> None:
    sys.stderr.write(f"downloading {archive.url} to {root}\n")
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=str(root)))
    try:
        file = partial / archive.name
        with urllib.request.urlopen(archive.url, timeout=_READ_TIMEOUT_S) as source, file.open("wb") as target:
            md5 = _copy(source, target)
            expected, received = source.headers.get("Content-Length"), target.tell()
        if expected is not None and received < int(expected):
            raise OSError(f"the server ended the connection after {received} of {expected} bytes; try again")
        if md5 != archive.md5:
            raise OSError(f"its MD5 checksum is {md5}, expected {archive.md5}")
        with tarfile.open(str(file)) as packed:
            options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.8.17
            packed.extractall(str(partial), **options)
        for each in (partial / archive.folder).rglob("*"):
            sync_file(each)  # also a folder in it
        rename_folder(partial / archive.folder, root / archive.folder)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)


def _copy(source: Any, target: Any) -> str:
    """Copy all bytes and return their MD5 checksum."""
    digest = hashlib.md5()
    for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()
