"""A process's connection to the rendezvous store. Standard library only: a launcher uses it without torch."""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import threading
import time
from typing import List, Optional, Sequence

from _pod import store_protocol as protocol
from _pod.store_protocol import Channel, PeerFailed, detect_dead_peer

RESPONSE_S = 60.0  # timeout of every response except that of `wait`
_TRANSFER_S = 3.0  # timeout of sending a request, and of receiving a response that has begun to arrive
_POLL_S = 0.05  # between two attempts to connect, and between two checks of `cancelled`


class StoreClient:
    """Keys and values shared by all processes. Thread-safe, one request at a time.

    Every method raises PeerFailed if the connection is lost, if no response arrives within RESPONSE_S, or if
    `cancelled` is set meanwhile; the connection is closed then.
    """

    def __init__(
        self, host: str, port: int, secret: str, connect_s: float, cancelled: Optional[threading.Event] = None
    ) -> None:
        """Connect within `connect_s` seconds.

        Raises:
            PeerFailed: the server does not answer, or `cancelled` was set.
            RuntimeError: the server cannot prove that it holds the secret.
        """
        self.cancelled = cancelled or threading.Event()  # set by another thread to end the current wait
        self._address = f"{host}:{port}"
        self._lock = threading.Lock()
        self._connection: Optional[socket.socket] = self._connect(host, port, bytes.fromhex(secret), connect_s)

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self._connection is not None

    def set(self, key: str, value: bytes) -> None:
        """Set the value of a key."""
        self._request(protocol.SET, key.encode(), value)

    def get(self, key: str) -> Optional[bytes]:
        """Return the value of a key; None if it does not exist."""
        values = self._request(protocol.GET, key.encode())
        return values[0] if values else None

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return len(self._request(protocol.GET, *(key.encode() for key in keys))) == len(keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        return int(self._request(protocol.ADD, key.encode(), str(amount).encode())[0])

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` if the current value is `expected` (b"" for a missing key); return the value afterwards."""
        return self._request(protocol.SWAP, key.encode(), expected, desired)[0]

    def delete(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return bool(self._request(protocol.DELETE, key.encode()))

    def count(self) -> int:
        """Return the number of keys."""
        return int(self._request(protocol.COUNT)[0])

    def wait(self, keys: Sequence[str], timeout_s: float, unless: Sequence[str] = ()) -> List[str]:
        """Wait until all `keys` exist, or any key of `unless` does; return those of `keys` that are missing.

        Returns early after `timeout_s` seconds, or when `cancelled` is set.
        """
        fields = [str(len(unless)).encode(), *(key.encode() for key in (*unless, *keys))]
        with self._lock:
            self._send(protocol.AWAIT, *fields)
            if not self._poll(timeout_s):
                self._send(protocol.CANCEL)
            return [key.decode() for key in self._receive()]

    def close(self) -> None:
        """Close the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, host: str, port: int, secret: bytes, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = self._open(host, port, deadline)
                try:
                    left_s = max(0.01, deadline - time.monotonic())
                    connection.settimeout(min(left_s, protocol.HANDSHAKE_S))
                    self._authenticate(connection, secret)
                except BaseException:
                    connection.close()
                    raise
            except (OSError, EOFError) as error:
                if self.cancelled.wait(_POLL_S):
                    raise PeerFailed(f"cancelled while connecting to the store at {self._address}") from error
                if time.monotonic() > deadline:
                    raise PeerFailed(
                        f"no store answers at {self._address} (tried for {timeout_s:g} s): {_text(error)}"
                    ) from error
            else:
                detect_dead_peer(connection)
                connection.settimeout(_TRANSFER_S)
                return connection

    def _open(self, host: str, port: int, deadline: float) -> socket.socket:
        """Connect as `socket.create_connection`, but not after `cancelled` is set."""
        failure = OSError(f"{host} has no address")
        for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            connection = socket.socket(family, kind, proto)
            connection.setblocking(False)
            code = connection.connect_ex(address)
            if code == errno.EINPROGRESS:
                has_ended = self._wait(connection, select.POLLOUT, deadline)
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if has_ended else errno.ETIMEDOUT
            if not code:
                return connection
            connection.close()
            failure = OSError(code, os.strerror(code))
        raise failure

    def _authenticate(self, connection: socket.socket, secret: bytes) -> None:
        """Verify the server's proof first, then send this process's own."""
        nonce = os.urandom(protocol.NONCE_BYTES)
        connection.sendall(nonce)
        if not self._wait(connection, select.POLLIN, time.monotonic() + (connection.gettimeout() or 0.0)):
            raise TimeoutError("no response")
        server_nonce, server_proof = _read(connection, protocol.NONCE_BYTES), _read(connection, protocol.PROOF_BYTES)
        if not hmac.compare_digest(server_proof, protocol.proof(secret, protocol.SERVER, nonce, server_nonce)):
            raise RuntimeError(
                f"the server at {self._address} does not have the secret of this process: it is the store of another"
                " pod, or another service"
            )
        connection.sendall(protocol.proof(secret, protocol.CLIENT, nonce, server_nonce))
        self._outgoing, self._incoming = (
            Channel(secret, sender, nonce, server_nonce) for sender in (protocol.CLIENT, protocol.SERVER)
        )

    def _request(self, verb: bytes, *fields: bytes) -> List[bytes]:
        with self._lock:
            self._send(verb, *fields)
            if not self._poll(RESPONSE_S):
                raise self._fail(TimeoutError(f"no response within {RESPONSE_S:g} s, or cancelled"))
            return self._receive()

    def _send(self, verb: bytes, *fields: bytes) -> None:
        message = self._outgoing.pack([verb, *fields])
        try:
            self._open_connection().sendall(message)
        except OSError as error:
            raise self._fail(error) from error

    def _poll(self, timeout_s: float) -> bool:
        """Return whether a response begins to arrive within the timeout and before `cancelled` is set."""
        return self._wait(self._open_connection(), select.POLLIN, time.monotonic() + timeout_s)

    def _wait(self, connection: socket.socket, event: int, deadline: float) -> bool:
        """Return whether the connection is ready for an event before the deadline and before `cancelled` is set."""
        poll = select.poll()
        poll.register(connection, event)
        while not poll.poll(1000 * min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            if self.cancelled.is_set() or time.monotonic() >= deadline:
                return False
        return True

    def _receive(self) -> List[bytes]:
        connection = self._open_connection()
        try:
            (length,) = protocol.HEADER.unpack(_read(connection, protocol.HEADER.size))
            if not protocol.PROOF_BYTES <= length <= protocol.MAX_MESSAGE_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            return self._incoming.unpack(_read(connection, length))
        except (OSError, EOFError) as error:
            raise self._fail(error) from error

    def _open_connection(self) -> socket.socket:
        if self._connection is None:
            raise PeerFailed(f"the connection to the store at {self._address} was closed")
        return self._connection

    def _fail(self, error: Exception) -> PeerFailed:
        self.close()  # the rest of this response would be read as the next one
        return PeerFailed(f"lost the connection to the store at {self._address}: {_text(error)}")


def _read(connection: socket.socket, length: int) -> bytes:
    """Return exactly `length` bytes; EOFError if the connection ends before."""
    content = bytearray()
    while len(content) < length:
        data = connection.recv(length - len(content))
        if not data:
            raise EOFError("the server closed the connection")
        content += data
    return bytes(content)


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
