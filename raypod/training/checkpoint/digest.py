"""Hashes of the files of a checkpoint: SHA-256 of small files, XXH3-128 of large ones. Does not import torch.

With SHA-256 hashing takes six times as long as loading, with XXH3-128 less than loading. Both find every damage that a
disk or a network causes. A manifest has the SHA-256 of the weights, too, whatever the size of their file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Iterable, Union

import xxhash
from typing_extensions import Protocol

SHA256, XXH3_128 = "sha256", "xxh3_128"  # the keys of a file's record in the manifest
TITLES = {SHA256: "SHA-256", XXH3_128: "XXH3-128"}
LARGE_BYTES = 16 << 20  # SHA-256 of a smaller file takes at most 12 ms
_CHUNK_BYTES = 256 << 10  # fits into the cache of a core: the hash does not read the chunk from memory


class Digest(Protocol):
    """A hash that is being computed."""

    def update(self, data: Union[bytes, memoryview]) -> None:
        """Append bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


def algorithm_for(size_bytes: int) -> str:
    """Return the algorithm for a new file."""
    return XXH3_128 if size_bytes >= LARGE_BYTES else SHA256


def new_digest(algorithm: str) -> Digest:
    """Return an empty hash."""
    return hashlib.sha256() if algorithm == SHA256 else xxhash.xxh3_128()


def digest_of(buffers: Iterable[Union[bytes, memoryview]], algorithm: str) -> str:
    """Return the hash of buffers, uint8 [bytes] each, as hexadecimal digits."""
    digest = new_digest(algorithm)
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def digest_of_file(path: Path, algorithm: str) -> str:
    """Return the hash of a file. OSError as from the file system.

    The file is read, not mapped: a failing disk is an error then, and not a signal that ends the process.
    """
    digest, chunk = new_digest(algorithm), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while True:
            count = file.readinto(chunk)
            if not count:
                return digest.hexdigest()
            digest.update(chunk[:count])
