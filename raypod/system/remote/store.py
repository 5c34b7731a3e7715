"""A folder of a remote storage: verified writes, reads, listings and removals, by names relative to the folder."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import os
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Optional, Set, Tuple

from raypod.system.files import FilePart
from raypod.system.remote.backends import OBJECT_STORES, S3, connect
from raypod.system.remote.errors import StorageError
from raypod.system.urls import scheme_of

_CHUNK_BYTES = 1 << 20
_PART_BYTES, _MAX_PARTS = 8 << 20, 9000  # of an upload in parts; S3 permits parts from 5 MiB on, and 10000 of them
_MAX_READ_BYTES = 64 << 20  # of a file that is read into memory
_PARTIAL = ".partial"


class Store:
    """A folder of a remote storage. All methods raise what the storage library raises, which is not only OSError.

    Attributes:
        progress_s: monotonic time of the last sign of progress.
        written_bytes: what has been uploaded.
        is_busy: whether an operation is in progress; the user sets it.
    """

    def __init__(self, url: str) -> None:
        """Nothing is connected until the first operation."""
        self.url = url
        self._is_object_store = scheme_of(url) in OBJECT_STORES
        self._is_s3 = scheme_of(url) in S3
        self._fs: Any = None
        self._root = ""
        self.progress_s, self.written_bytes, self.is_busy = time.monotonic(), 0, False

    def disconnect(self) -> None:
        """Forget the connection; the next operation connects again."""
        file_system, self._fs = self._fs, None
        close = getattr(file_system, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):  # a connection that is lost
                close()

    def write(self, name: str, source: FilePart) -> str:
        """Upload the part of a file, verify what the storage holds, and return its SHA-256.

        An existing object is replaced as a whole: on storages that cannot do that, by renaming a partial file.

        Raises:
            StorageError: the storage holds something else after the upload, or the file is shorter.
        """
        part_bytes = max(_PART_BYTES, -(-source.size_bytes // _MAX_PARTS // _CHUNK_BYTES) * _CHUNK_BYTES)
        digests, target = Digests(part_bytes if self._is_object_store else None), self._path(name)
        written = target if self._is_object_store else target + _PARTIAL
        with self._writing(written, part_bytes) as output:
            for chunk in source.chunks(_CHUNK_BYTES):
                output.write(chunk)
                digests.add(chunk)
                self.progress_s = time.monotonic()
            if digests.size_bytes < source.size_bytes:
                raise StorageError(f"{name} has become shorter while it was read")
        self._verify(name, written, digests)
        if written != target:
            self._rename(written, target)
        self.written_bytes += source.size_bytes
        return digests.sha256

    def write_bytes(self, name: str, content: bytes) -> str:
        """Upload bytes as `write`."""
        return self.write(name, FilePart(io.BytesIO(content), len(content)))

    def read(self, name: str, most_bytes: int = _MAX_READ_BYTES) -> Optional[bytes]:
        """Return the content of a small file, or its first bytes; None if there is none."""
        output = io.BytesIO()
        try:
            self._copy(self._path(name), output, most_bytes)
        except FileNotFoundError:
            return None
        return output.getvalue()

    def read_range(self, name: str, first: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes of a file, or what it has of them. FileNotFoundError if there is none."""
        content: bytes = self._connected().cat_file(self._path(name), start=first, end=first + size_bytes)
        self.progress_s = time.monotonic()
        return content

    def download(self, name: str, target: Path, most_bytes: int) -> None:
        """Copy a file, at most `most_bytes` of it, into a new file of this host. FileNotFoundError if there is none."""
        with target.open("wb") as output:
            self._copy(self._path(name), output, most_bytes)
            output.flush()
            os.fsync(output.fileno())

    def list_folder(self, name: str = "") -> Optional[Dict[str, Optional[int]]]:
        """Return the sizes in bytes of the files of a folder by their name, None for a folder in it.

        Returns None if the folder does not exist; object stores have no empty folders.
        """
        file_system, path = self._connected(), self._path(name)
        file_system.invalidate_cache()
        try:
            found: List[Dict[str, Any]] = file_system.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        finally:
            self.progress_s = time.monotonic()
        names = {str(each["name"]).rstrip("/").rpartition("/")[2]: each for each in found}
        own = path.rstrip("/").rpartition("/")[2]
        is_itself = [each for each in found if str(each["name"]).strip("/") == path.strip("/")]
        if is_itself:  # some storages list a folder in itself
            names.pop(own, None)
        return {key: None if each["type"] == "directory" else int(each["size"] or 0) for key, each in names.items()}

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._connected().rm_file(self._path(name))
        self.progress_s = time.monotonic()

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder without files where the storage has folders."""
        if not self._is_object_store:
            with contextlib.suppress(FileNotFoundError):
                self._connected().rmdir(self._path(name))

    def _connected(self) -> Any:
        file_system = self._fs
        if file_system is None:
            file_system, self._root = connect(self.url)
            self._fs = file_system  # last: another thread may wait for it
            self.progress_s = time.monotonic()
        return file_system

    def _path(self, name: str) -> str:
        self._connected()
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    @contextlib.contextmanager
    def _writing(self, path: str, part_bytes: int) -> Iterator[Any]:
        """Open a file for writing. After an error, an object store keeps nothing of it."""
        if not self._is_object_store:
            self._connected().makedirs(path.rpartition("/")[0], exist_ok=True)
        output = self._connected().open(path, "wb", block_size=part_bytes)
        try:
            yield output
        except BaseException:
            _abandon(output)
            if not self._is_object_store:
                with contextlib.suppress(Exception):  # the storage is lost or full: the first error counts
                    self._connected().rm_file(path)
            raise
        output.close()
        self.progress_s = time.monotonic()

    def _rename(self, source: str, target: str) -> None:
        """Replace `target` by `source` in one step."""
        file_system = self._connected()
        if hasattr(file_system, "ftp"):
            file_system.ftp.posix_rename(source, target)
        else:
            file_system.mv(source, target)

    def _verify(self, name: str, path: str, digests: Digests) -> None:
        """Compare what the storage holds with what was written: by its checksum, otherwise by reading it back."""
        file_system = self._connected()
        file_system.invalidate_cache()
        info = file_system.info(path)
        if info["size"] != digests.size_bytes:
            expected = f"expected {digests.size_bytes}"
            raise StorageError(f"{name} has {info['size']} bytes on the storage after its upload, {expected}")
        if checksum_in(info) in digests.checksums:
            return
        back = Digests(None)
        with file_system.open(path, "rb", block_size=_PART_BYTES, **self._reading()) as file:
            for chunk in self._chunks(file, digests.size_bytes + 1):
                back.add(chunk)
        if back.sha256 != digests.sha256:
            raise StorageError(f"{name} has another content on the storage after its upload")

    def _copy(self, path: str, output: BinaryIO, most_bytes: int) -> None:
        """Write the content of a file to `output`, from S3 in one request; what a lost connection leaves, in ranges."""
        file_system, first = self._connected(), 0
        if self._is_s3:
            from fsspec.asyn import sync  # only a run with a remote storage needs it

            first, is_complete = sync(file_system.loop, self._stream, file_system, path, output, most_bytes)
            if is_complete:
                return
        file_system.invalidate_cache()
        with file_system.open(path, "rb", block_size=_PART_BYTES, **self._reading()) as file:
            file.seek(first)
            for chunk in self._chunks(file, most_bytes - first):
                output.write(chunk)

    async def _stream(self, file_system: Any, path: str, output: BinaryIO, most_bytes: int) -> Tuple[int, bool]:
        """Write the content of an object to `output`; return the bytes, and whether no more are missing."""
        received, file = 0, await file_system.open_async(path, "rb")
        try:
            while received < most_bytes:
                try:
                    chunk = await file.read(min(_CHUNK_BYTES, most_bytes - received))
                except Exception:
                    if file.r is None:  # there is no response
                        raise
                    return received, False
                if not chunk:
                    break
                output.write(chunk)
                received += len(chunk)
                self.progress_s = time.monotonic()
            return received, True
        finally:
            if file.r is not None:
                file.r.close()  # the file does not

    def _reading(self) -> Dict[str, Any]:
        """Return options for reading a file once from its beginning to its end."""
        return {"cache_type": "readahead"} if self._is_object_store else {}

    def _chunks(self, file: Any, most_bytes: int) -> Iterator[bytes]:
        left = most_bytes
        while left > 0:
            chunk = file.read(min(_CHUNK_BYTES, left))
            if not chunk:
                return
            left -= len(chunk)
            self.progress_s = time.monotonic()
            yield chunk


def _abandon(output: Any) -> None:
    """Close a file whose content is incomplete, without creating the object where that is possible."""
    discard = getattr(output, "discard", None)
    with contextlib.suppress(Exception):  # the first error counts
        if callable(discard) and hasattr(output, "offset"):
            discard()
            output.closed = True
        else:
            output.close()


def _new_md5() -> Any:
    """Return an MD5 object; None where the system forbids MD5. It only detects damage in transfer."""
    try:
        return hashlib.new("md5")
    except ValueError:
        return None


class Digests:
    """Digests of a stream of bytes.

    An object store describes an object by its MD5; S3 one that was uploaded in parts by the MD5 of the MD5s of its
    parts, and their number.
    """

    def __init__(self, part_bytes: Optional[int]) -> None:
        """`part_bytes` is the size of the parts of an upload, except the last one; None: without checksums."""
        self._part_bytes = self._left = part_bytes or 0
        self._sha256 = hashlib.sha256()
        self._part = _new_md5() if part_bytes else None  # of the current part
        self._whole: Any = None  # from the second part on; before, it is that of the part
        self._parts: List[bytes] = []
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of what was added."""
        return self._sha256.hexdigest()

    @property
    def checksums(self) -> Set[str]:
        """The checksums, in lower case, with which a store may describe the object."""
        if self._part is None:
            return set()
        parts = [*self._parts, *([self._part.digest()] if self._left < self._part_bytes else [])]
        combined = _new_md5()
        combined.update(b"".join(parts))
        whole = self._part if self._whole is None else self._whole
        return {whole.hexdigest(), f"{combined.hexdigest()}-{len(parts)}"}

    def add(self, data: bytes) -> None:
        """Add bytes to the end."""
        self.size_bytes += len(data)
        self._sha256.update(data)
        view = memoryview(data)
        while self._part is not None and len(view):
            taken = view[: self._left]
            self._part.update(taken)
            if self._whole is not None:
                self._whole.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]
            if not self._left:
                self._whole = self._whole or self._part
                self._parts.append(self._part.digest())
                self._part, self._left = _new_md5(), self._part_bytes


def checksum_in(info: Dict[str, Any]) -> Optional[str]:
    """Return the checksum by which a store describes an object, in lower case; None if it has none that is known.

    `info` is that of fsspec: S3 has `ETag`, Google Cloud Storage `md5Hash`, in base64.
    """
    etag, base64_md5 = info.get("ETag"), info.get("md5Hash")
    if isinstance(base64_md5, str):
        try:
            return base64.b64decode(base64_md5, validate=True).hex()
        except binascii.Error:
            return None
    return etag.strip('"').lower() if isinstance(etag, str) else None
