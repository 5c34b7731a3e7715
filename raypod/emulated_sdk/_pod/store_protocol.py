"""The wire protocol of the rendezvous store, shared by client and server. Standard library only.

Both sides hold a secret that is never sent. Each authenticates to the other with an HMAC over two random nonces, one
from each side; every later message carries an HMAC over its content and its sequence number. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from typing import List, Sequence

NONCE_BYTES = PROOF_BYTES = 32
HEADER = struct.Struct(">I")  # length of a message, and of each of its fields
MAX_MESSAGE_BYTES = 1 << 24
HANDSHAKE_S = 5.0
SERVER, CLIENT = b"store", b"process"  # the roles, as they enter the HMACs

SET, GET, ADD, SWAP, DELETE, COUNT, AWAIT, CANCEL = (bytes([code]) for code in range(8))

_USER_TIMEOUT_S = 10


class PeerFailed(RuntimeError):
    """The cause is another process: it has ended, failed, did not join or does not respond."""


def new_secret() -> str:
    """Return 256 random bits as hexadecimal digits, for the environment of the pod's processes."""
    return secrets.token_hex(32)


def proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the HMAC by which a role proves that it holds the secret."""
    return hmac.new(secret, b"proof of the " + role + client_nonce + server_nonce, hashlib.sha256).digest()


def content_proof(secret: bytes, context: str, content: bytes) -> bytes:
    """Return the HMAC, PROOF_BYTES long, by which a process proves that it has sent content in a context."""
    return hmac.new(secret, b"content of " + context.encode() + b"\0" + content, hashlib.sha256).digest()


class Channel:
    """One direction of a connection: packs and unpacks messages, and detects forged, changed or replayed ones."""

    def __init__(self, secret: bytes, sender: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        text = b"messages of the " + sender + client_nonce + server_nonce
        self._key = hmac.new(secret, text, hashlib.sha256).digest()
        self._count = 0

    def pack(self, fields: Sequence[bytes]) -> bytes:
        """Return the bytes of a message; ConnectionError if it is too long."""
        body = b"".join(piece for field in fields for piece in (HEADER.pack(len(field)), field))
        if len(body) + PROOF_BYTES > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {len(body)} bytes is too long; {MAX_MESSAGE_BYTES} are allowed")
        return HEADER.pack(len(body) + PROOF_BYTES) + body + self._next_hmac(body)

    def unpack(self, content: bytes) -> List[bytes]:
        """Return the fields of a message without its header; ConnectionError if its HMAC is wrong."""
        body, end = content[:-PROOF_BYTES], len(content) - PROOF_BYTES
        if not hmac.compare_digest(content[-PROOF_BYTES:], self._next_hmac(body)):
            raise ConnectionError("a message does not carry the HMAC of the authenticated sender")
        fields, position = [], 0
        while position < end:
            (length,) = HEADER.unpack_from(body, position)
            position += HEADER.size + length
            fields.append(body[position - length : position])
        return fields

    def _next_hmac(self, body: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, self._count.to_bytes(8, "big") + body, hashlib.sha256).digest()


def detect_dead_peer(connection: socket.socket) -> None:
    """Make TCP end the connection within about 10 s of the other host's last answer, instead of minutes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _USER_TIMEOUT_S)
