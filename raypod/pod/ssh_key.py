"""Whether an ssh key has a passphrase: without an agent, a program for which ssh must not ask cannot use it."""

from __future__ import annotations

import binascii
import struct
from pathlib import Path

_OPENSSH, _MAGIC = b"-----BEGIN OPENSSH PRIVATE KEY-----", b"openssh-key-v1\0"
_PEM = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
_MAX_BYTES = 1 << 16


def has_passphrase(path: str) -> bool:
    """Return whether a private key is encrypted; False for a file that is missing, or of another format."""
    try:
        with Path(path).expanduser().open("rb") as file:
            lines = [line.strip() for line in file.read(_MAX_BYTES).splitlines()]
        if lines[:1] != [_OPENSSH]:
            return any(line in _PEM for line in lines)
        content = binascii.a2b_base64(b"".join(line for line in lines if not line.startswith(b"-----")))
        (size,) = struct.unpack_from(">I", content, len(_MAGIC))
    except (OSError, RuntimeError, ValueError, struct.error):  # RuntimeError: no home folder
        return False
    at = len(_MAGIC) + 4
    return content.startswith(_MAGIC) and content[at : at + size] != b"none"  # the cipher: PROTOCOL.key of OpenSSH
