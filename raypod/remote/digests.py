"""Digests of what is uploaded: SHA-256, and the checksums with which object stores describe an object."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, Dict, List, Optional, Set


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
