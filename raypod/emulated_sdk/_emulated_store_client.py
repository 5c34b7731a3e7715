"""A process's connection to the store at which a pod's processes meet. Standard library alone."""

from __future__ import annotations

import hmac
import os
import select
import socket
import threading
import time
from typing import List, Optional, Sequence

from _emulated_store_protocol import (
    ADD,
    AWAIT,
    CANCEL,
    CLIENT,
    COUNT,
    DELETE,
    GET,
    HANDSHAKE_S,
    HEAD,
    MOST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SERVER,
    SET,
    SWAP,
    PeerFailed,
    Seal,
    notice_silence,
    proof,
)

ANSWER_S = 60.0  # the bound of every answer but those to `wait`
_PARTING_S = 3.0  # of one that is on its way, or that was asked for at once
_PAUSE_S = 0.05  # between two tries to connect, and between two looks whether to wait on


class StoreClient:
    """Keys and values that all processes share. Safe to be used from several threads, one request at a time.

    Every method raises PeerFailed if the store is gone, or does not answer within ANSWER_S or before
    `given_up` is set; then all later ones do.
    """

    def __init__(self, host: str, port: int, secret: str, connect_s: float) -> None:
        """Connect within `connect_s` seconds.

        Raises:
            PeerFailed: nobody answers there.
            RuntimeError: who answers does not know the secret.
        """
        self.given_up = threading.Event()  # set from another thread: no wait goes on
        self._where = f"{host}:{port}"
        self._lock = threading.Lock()
        self._connection: Optional[socket.socket] = self._connect(host, port, bytes.fromhex(secret), connect_s)

    @property
    def is_open(self) -> bool:
        """Whether it is of use still."""
        return self._connection is not None

    def set(self, key: str, value: bytes) -> None:
        """Keep a value; one that was there is gone."""
        self._ask(SET, key.encode(), value)

    def get(self, key: str) -> Optional[bytes]:
        """The value of a key; None if it is not there."""
        values = self._ask(GET, key.encode())
        return values[0] if values else None

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return len(self._ask(GET, *(key.encode() for key in keys))) == len(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if it is not there; the sum."""
        return int(self._ask(ADD, key.encode(), str(amount).encode())[0])

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Keep `desired` if the value is `expected`; the value then. Nothing is expected of a key that is not there."""
        return self._ask(SWAP, key.encode(), expected, desired)[0]

    def delete(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._ask(DELETE, key.encode()))

    def count(self) -> int:
        """How many keys there are."""
        return int(self._ask(COUNT)[0])

    def wait(self, keys: Sequence[str], within_s: float, unless: Sequence[str] = ()) -> List[str]:
        """Wait until all keys are there, or one of `unless` instead; those that are missing then.

        Ends after `within_s` seconds, or when `given_up` is set.
        """
        asked = [str(len(unless)).encode(), *(key.encode() for key in (*unless, *keys))]
        with self._lock:
            self._send(AWAIT, *asked)
            if not self._is_answered(within_s):
                self._send(CANCEL)
            return [key.decode() for key in self._receive()]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ---- the connection --------------------------------------------------------------------------------------------

    def _connect(self, host: str, port: int, secret: bytes, within_s: float) -> socket.socket:
        deadline = time.monotonic() + within_s
        while True:
            left_s = max(0.01, deadline - time.monotonic())
            try:
                connection = socket.create_connection((host, port), left_s)
                try:
                    connection.settimeout(min(left_s, HANDSHAKE_S))
                    self._introduce(connection, secret)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, EOFError) as error:
                if time.monotonic() + _PAUSE_S > deadline:
                    raise PeerFailed(
                        f"no store answers at {self._where} (tried for {within_s:g} s): {_text(error)}"
                    ) from error
                time.sleep(_PAUSE_S)
            else:
                notice_silence(connection)
                connection.settimeout(_PARTING_S)
                return connection

    def _introduce(self, connection: socket.socket, secret: bytes) -> None:
        """Prove to the store that this process knows the secret, after the store has."""
        own = os.urandom(NONCE_BYTES)
        connection.sendall(own)
        theirs, said = _read(connection, NONCE_BYTES), _read(connection, PROOF_BYTES)
        if not hmac.compare_digest(said, proof(secret, SERVER, own, theirs)):
            raise RuntimeError(
                f"who listens at {self._where} does not know the secret that this process has: it is another pod's "
                "store, or a stranger's"
            )
        connection.sendall(proof(secret, CLIENT, own, theirs))
        self._outgoing, self._incoming = (Seal(secret, sender, own, theirs) for sender in (CLIENT, SERVER))

    def _ask(self, verb: bytes, *words: bytes) -> List[bytes]:
        with self._lock:
            self._send(verb, *words)
            if not self._is_answered(ANSWER_S):
                raise self._gone(TimeoutError(f"no answer within {ANSWER_S:g} s, or given up"))
            return self._receive()

    def _send(self, verb: bytes, *words: bytes) -> None:
        message = self._outgoing.close([verb, *words])
        try:
            self._open().sendall(message)
        except OSError as error:
            raise self._gone(error) from error

    def _is_answered(self, within_s: float) -> bool:
        """Whether an answer comes within a time, and before `given_up`."""
        poll, deadline = select.poll(), time.monotonic() + within_s
        poll.register(self._open(), select.POLLIN)
        while not poll.poll(1000 * min(_PAUSE_S, max(0.0, deadline - time.monotonic()))):
            if self.given_up.is_set() or time.monotonic() >= deadline:
                return False
        return True

    def _receive(self) -> List[bytes]:
        """The answer, which is on its way."""
        connection = self._open()
        try:
            (length,) = HEAD.unpack(_read(connection, HEAD.size))
            if not PROOF_BYTES <= length <= MOST_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            return self._incoming.open(_read(connection, length))
        except (OSError, EOFError) as error:
            raise self._gone(error) from error

    def _open(self) -> socket.socket:
        if self._connection is None:
            raise PeerFailed(f"the store at {self._where} cannot be used any more: the connection has ended")
        return self._connection

    def _gone(self, error: Exception) -> PeerFailed:
        self.close()  # a rest of this answer would be taken for the next
        return PeerFailed(f"the store at {self._where} is gone, or its host is: {_text(error)}")


def _read(connection: socket.socket, length: int) -> bytes:
    """Exactly as many bytes; EOFError if the other side ends before."""
    content = bytearray()
    while len(content) < length:
        data = connection.recv(length - len(content))
        if not data:
            raise EOFError("it has closed the connection")
        content += data
    return bytes(content)


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
