"""What the storage holds after an upload is verified, by its checksum or by reading it back."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from raypod.system.remote.errors import StorageError
from raypod.system.remote.store import Digests, Store, checksum_in
from tests.support.mirrored_runs import faults


def test_an_upload_is_read_back_where_the_storage_has_no_checksum(tmp_path: Path) -> None:
    def garble(operation: str, path: str) -> None:
        if operation == "close":
            Path(path).write_bytes(b"garbled")

    with faults(garble), pytest.raises(StorageError, match="another content on the storage"):
        Store(f"file://{tmp_path}/remote").write_bytes("name", b"1234567")


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 25])
def test_checksums_of_objects(size: int) -> None:
    data = bytes(range(size))
    digests = Digests(10)
    for first in range(0, size, 3):
        digests.add(data[first : first + 3])
    whole = hashlib.md5(data)
    parts = [hashlib.md5(data[first : first + 10]).digest() for first in range(0, size, 10)]
    combined = f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"
    assert checksum_in({"ETag": f'"{whole.hexdigest().upper()}"'}) in digests.checksums
    assert checksum_in({"md5Hash": base64.b64encode(whole.digest()).decode()}) in digests.checksums
    assert checksum_in({"ETag": f'"{combined}"'}) in digests.checksums
    assert checksum_in({"ETag": '"0-1"'}) not in digests.checksums
    assert checksum_in({"size": 1}) is None
    assert digests.sha256 == hashlib.sha256(data).hexdigest()
