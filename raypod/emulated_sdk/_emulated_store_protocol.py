"""What is said on a connection to the store at which a pod's processes meet, whichever side says it.

Both sides know a secret that is never sent. Each proves it to the other by an HMAC over two fresh random numbers, one
of each side; every message after that carries one over itself and its place in the conversation. Nothing is encrypted.
Standard library alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from typing import List, Sequence

NONCE_BYTES = PROOF_BYTES = 32
HEAD = struct.Struct(">I")  # of a message, and of each of its parts: the length
MOST_BYTES = 1 << 24  # of one message
HANDSHAKE_S = 5.0
SERVER, CLIENT = b"store", b"process"  # who proves, or sends

SET, GET, ADD, SWAP, DELETE, COUNT, AWAIT, CANCEL = (bytes([code]) for code in range(8))

_SILENT_S = 10  # a host that does not answer at all is given up after it


class PeerFailed(RuntimeError):
    """The other processes are the cause: one has ended, failed, stays away or is silent."""


def new_secret() -> str:
    """256 random bits as text, for the environment of the processes that shall meet."""
    return secrets.token_hex(32)


def proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What only who knows the secret can say of these two numbers in this role."""
    return hmac.new(secret, b"proof of the " + role + client_nonce + server_nonce, hashlib.sha256).digest()


class Seal:
    """Of one direction of one conversation: its messages, in order, can be neither made, changed nor repeated."""

    def __init__(self, secret: bytes, sender: bytes, client_nonce: bytes, server_nonce: bytes) -> None:
        text = b"messages of the " + sender + client_nonce + server_nonce
        self._key = hmac.new(secret, text, hashlib.sha256).digest()
        self._count = 0

    def close(self, parts: Sequence[bytes]) -> bytes:
        """The bytes of a message on the wire; ConnectionError if they are too many."""
        body = b"".join(piece for part in parts for piece in (HEAD.pack(len(part)), part))
        if len(body) + PROOF_BYTES > MOST_BYTES:
            raise ConnectionError(f"a message of {len(body)} bytes is too long; {MOST_BYTES} are allowed")
        return HEAD.pack(len(body) + PROOF_BYTES) + body + self._proof_of(body)

    def open(self, content: bytes) -> List[bytes]:
        """The parts of a message, of which `content` is all but the head; ConnectionError if it is not genuine."""
        body, end = content[:-PROOF_BYTES], len(content) - PROOF_BYTES
        if not hmac.compare_digest(content[-PROOF_BYTES:], self._proof_of(body)):
            raise ConnectionError("a message is not of who has proved to know the secret")
        parts, at = [], 0
        while at < end:
            (length,) = HEAD.unpack_from(body, at)
            at += HEAD.size + length
            parts.append(body[at - length : at])
        return parts

    def _proof_of(self, body: bytes) -> bytes:
        self._count += 1
        return hmac.new(self._key, self._count.to_bytes(8, "big") + body, hashlib.sha256).digest()


def notice_silence(connection: socket.socket) -> None:
    """End the connection when the other host does not answer any more, long before TCP itself would."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_S)
