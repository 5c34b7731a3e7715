"""Broadcast the weights from one instance to those that lack them, pipelined along a chain of instances.

Each receiver forwards every chunk while the next one arrives, so a broadcast takes about as long as one transfer over
one link, whatever the number of hosts. Both sides of each connection authenticate with a secret that is made for one
broadcast, and an HMAC over all bytes authenticates the content. Sockets are bound to the data network's address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hmac
import json
import os
import queue
import secrets
import select
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from raypod.errors import PeerLost

_CHUNK_BYTES, _SMALL_BYTES = 1 << 18, 1 << 16  # every link of the chain adds the time of one chunk
_NONCE_BYTES, _DIGEST = 32, "sha256"
_DIGEST_BYTES = 32
_HANDSHAKE_S = 5.0  # bounds how long an unauthenticated connection can delay the broadcast
_UNREACHABLE_S = 10  # after this many seconds without an acknowledgement, TCP closes the connection
_HEADER = struct.Struct(">cI")  # of a message: its kind and its length in bytes
_SIZE, _CHUNK, _END, _FAILED, _KEEPALIVE = b"S", b"P", b"E", b"F", b"W"


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The address on which an instance accepts the connection of its predecessor in the chain."""

    instance: int
    host: str
    address: str
    port: int


@dataclasses.dataclass(frozen=True)
class Seeding:
    """One broadcast: its root, its receivers and its secret. The coordinator sends it to every instance.

    `endpoints` holds those of all instances, by index. Only `root` and `receivers` take part.
    """

    root: int
    receivers: Tuple[int, ...]
    endpoints: Tuple[Endpoint, ...]
    secret: bytes = dataclasses.field(repr=False)

    @property
    def chain(self) -> Tuple[int, ...]:
        """The root, the receivers after it, then those before it: instances of one host stay neighbours."""
        later = [each for each in sorted(self.receivers) if each > self.root]
        return (self.root, *later, *(each for each in sorted(self.receivers) if each < self.root))


def new_seeding(endpoints: Sequence[Endpoint], root: int = 0, receivers: Optional[Sequence[int]] = None) -> Seeding:
    """Return a broadcast from instance `root` to `receivers` (default: all others), with a new secret."""
    chosen = range(len(endpoints)) if receivers is None else receivers
    return Seeding(root, tuple(each for each in chosen if each != root), tuple(endpoints), secrets.token_bytes(32))


class SeedingPeer:
    """One instance's side of a broadcast. It listens from construction until `close`."""

    def __init__(self, instance: int, host: str, address: str, timeout_s: float) -> None:
        """Listen on `address`, this host's in the data network. Every single wait is bounded by `timeout_s`."""
        self._listener = socket.create_server((address, 0))
        self._sockets: List[socket.socket] = [self._listener]
        self._is_aborted = False
        self._timeout_s = timeout_s
        self.endpoint = Endpoint(instance, host, address, self._listener.getsockname()[1])

    def send(self, seeding: Seeding, buffers: Sequence[np.ndarray]) -> None:
        """Send the concatenation of `buffers` (uint8 [bytes] each) to the first receiver. For the root.

        Raises:
            PeerLost: the receiver is unreachable or has closed the connection.
        """
        digest = hmac.new(seeding.secret, digestmod=_DIGEST)
        with self._forwarding(seeding) as sender:
            sender.put(_SIZE, sum(buffer.size for buffer in buffers).to_bytes(8, "big"))
            for chunk in _chunks(buffers):
                digest.update(chunk)
                sender.put(_CHUNK, chunk)
            sender.put(_END, digest.digest())

    def receive(self, seeding: Seeding) -> np.ndarray:
        """Return the root's bytes, uint8 [bytes], and forward them to the next receiver meanwhile.

        Raises:
            PeerLost: any predecessor in the chain, or the successor, is unreachable or has closed the connection.
        """
        predecessor = seeding.endpoints[seeding.chain[seeding.chain.index(self.endpoint.instance) - 1]]
        with self._forwarding(seeding) as sender:
            try:
                with self._accept(seeding, predecessor) as connection:
                    return _receive(connection, seeding.secret, sender)
            except (OSError, EOFError) as error:
                lost = _peer_lost(self.endpoint, predecessor, error)
                sender.put(_FAILED, json.dumps(dataclasses.astuple(lost)).encode())
                raise lost from error

    def abort(self) -> None:
        """End `send` and `receive` from another thread, by closing their connections, also those that connect."""
        self._is_aborted = True
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # already closed
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    @contextlib.contextmanager
    def _forwarding(self, seeding: Seeding) -> Iterator[_Sender]:
        """Run the thread that sends to the successor. Its error is raised only after everything is received."""
        chain = seeding.chain
        next_index = chain.index(self.endpoint.instance) + 1
        successor = seeding.endpoints[chain[next_index]] if next_index < len(chain) else None
        sender = _Sender(self.endpoint, successor, seeding.secret, self._timeout_s, self._register)
        sender.start()
        try:
            yield sender
        except BaseException:
            sender.put(_FAILED, b"")
            raise
        finally:
            sender.join()  # terminates: each of its sends has a timeout
        if sender.error is not None:
            raise sender.error

    def _register(self, connection: socket.socket) -> None:
        """Let `abort` end a connection, which connects already. ConnectionAbortedError if `abort` was called before."""
        self._sockets.append(connection)
        if self._is_aborted:
            raise ConnectionAbortedError("the broadcast was aborted")

    def _accept(self, seeding: Seeding, predecessor: Endpoint) -> socket.socket:
        """Return the authenticated connection of the predecessor; close all others."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, (address, *_) = self._listener.accept()
            except socket.timeout:
                raise socket.timeout(f"it has not connected within {self._timeout_s:g} s") from None
            if address == predecessor.address and _authenticate_sender(connection, seeding.secret):
                connection.settimeout(self._timeout_s)
                _enable_keepalive(connection)
                self._register(connection)
                return connection
            connection.close()
            reason = f"expected {predecessor.address}" if address != predecessor.address else "authentication failed"
            sys.stderr.write(f"seeding: rejected a connection from {address}: {reason}\n")


class _Sender(threading.Thread):
    """Sends queued messages to the successor, parallel to receiving. Without a successor it discards them."""

    def __init__(
        self,
        own: Endpoint,
        successor: Optional[Endpoint],
        secret: bytes,
        timeout_s: float,
        register: Callable[[socket.socket], None],
    ) -> None:
        super().__init__(name="seeding", daemon=True)
        self._own, self._successor, self._secret = own, successor, secret
        self._timeout_s, self._register = timeout_s, register
        self._messages: queue.SimpleQueue[Tuple[bytes, Any]] = queue.SimpleQueue()
        self.error: Optional[PeerLost] = None

    def put(self, kind: bytes, content: Any) -> None:
        """Queue a message. Its content must not change afterwards."""
        self._messages.put((kind, content))

    def run(self) -> None:
        if self._successor is None:
            return
        try:
            with socket.socket() as connection:
                self._connect(connection, self._successor)
                _authenticate_receiver(connection, self._secret)
                _enable_keepalive(connection)
                kind = b""
                while kind not in (_END, _FAILED):
                    kind, content = self._next()
                    connection.sendall(_HEADER.pack(kind, len(content)), socket.MSG_MORE)
                    connection.sendall(content)
        except (OSError, EOFError) as error:
            self.error = _peer_lost(self._own, self._successor, error)

    def _connect(self, connection: socket.socket, successor: Endpoint) -> None:
        """Connect within the timeout. Another thread can end that: a host whose packets are dropped answers nothing."""
        connection.bind((self._own.address, 0))
        connection.setblocking(False)
        code = connection.connect_ex((successor.address, successor.port))
        self._register(connection)
        if code == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            if not poller.poll(1000 * self._timeout_s):
                raise socket.timeout(f"it has not answered within {self._timeout_s:g} s")
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        connection.settimeout(self._timeout_s)

    def _next(self) -> Tuple[bytes, Any]:
        """Return the next message, or a keepalive while there is none: only the first receiver's wait times out."""
        try:
            return self._messages.get(timeout=self._timeout_s / 4)
        except queue.Empty:
            return _KEEPALIVE, b""


def _chunks(buffers: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """Split large buffers and concatenate small ones."""
    small: List[np.ndarray] = []
    for buffer in buffers:
        if buffer.size < _SMALL_BYTES:
            small.append(buffer)
            if sum(each.size for each in small) < _CHUNK_BYTES:
                continue
        if small:
            yield _view(np.concatenate(small))
            small = []
        if buffer.size >= _SMALL_BYTES:
            for first in range(0, buffer.size, _CHUNK_BYTES):
                yield _view(buffer[first : first + _CHUNK_BYTES])
    if small:
        yield _view(np.concatenate(small))


def _view(array: np.ndarray) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _receive(connection: socket.socket, secret: bytes, sender: _Sender) -> np.ndarray:
    """Receive all messages of the predecessor and forward each immediately."""
    digest = hmac.new(secret, digestmod=_DIGEST)
    received, filled = np.empty(0, dtype=np.uint8), 0
    while True:
        kind, length = _HEADER.unpack(_read(connection, _HEADER.size))
        if kind == _CHUNK:
            chunk = _view(received[filled : filled + length])
            _read_into(connection, chunk)
            sender.put(kind, chunk)
            digest.update(chunk)
            filled += length
            continue
        content = _read(connection, length)
        if kind == _KEEPALIVE:
            continue
        if kind == _FAILED:
            if not content:
                raise EOFError("it has failed")
            sender.put(kind, content)  # so that every receiver reports the first cause
            raise PeerLost(*json.loads(content))
        sender.put(kind, content)
        if kind == _SIZE:
            received = np.empty(int.from_bytes(content, "big"), dtype=np.uint8)
        elif filled != received.size or not hmac.compare_digest(content, digest.digest()):
            raise EOFError("the received bytes are not those of the root (HMAC mismatch)")
        else:
            return received


def _authenticate_receiver(connection: socket.socket, secret: bytes) -> None:
    """Perform the sender's side of the handshake. ConnectionError if the listener does not have the secret."""
    own = os.urandom(_NONCE_BYTES)
    connection.sendall(own)
    theirs, proof = _read(connection, _NONCE_BYTES), _read(connection, _DIGEST_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"receiver", own, theirs)):
        raise ConnectionError("authentication failed: the listener does not have the secret of this broadcast")
    connection.sendall(_proof(secret, b"sender", own, theirs))


def _authenticate_sender(connection: socket.socket, secret: bytes) -> bool:
    """Perform the receiver's side of the handshake. Return whether the sender has the secret."""
    deadline_s = time.monotonic() + _HANDSHAKE_S  # of all: a byte from time to time must not keep the others waiting
    try:
        theirs, own = _read(connection, _NONCE_BYTES, deadline_s), os.urandom(_NONCE_BYTES)
        connection.sendall(own + _proof(secret, b"receiver", theirs, own))
        proof = _read(connection, _DIGEST_BYTES, deadline_s)
        return hmac.compare_digest(proof, _proof(secret, b"sender", theirs, own))
    except (OSError, EOFError):
        return False


def _proof(secret: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return hmac.new(secret, role + sender_nonce + receiver_nonce, _DIGEST).digest()


def _enable_keepalive(connection: socket.socket) -> None:
    """End the connection soon after the other host stops answering; TCP's default is hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREACHABLE_S)


def _read(connection: socket.socket, length: int, deadline_s: Optional[float] = None) -> bytes:
    content = bytearray(length)
    _read_into(connection, memoryview(content), deadline_s)
    return bytes(content)


def _read_into(connection: socket.socket, buffer: memoryview, deadline_s: Optional[float] = None) -> None:
    """Fill `buffer`. EOFError if the connection is closed before, socket.timeout at the deadline, a monotonic time."""
    while buffer:
        if deadline_s is not None:
            connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        count = connection.recv_into(buffer)
        if not count:
            raise EOFError("it closed the connection")
        buffer = buffer[count:]


def _peer_lost(own: Endpoint, peer: Endpoint, error: Exception) -> PeerLost:
    cause = " ".join(str(error).split()) or type(error).__name__
    return PeerLost(own.instance, own.host, peer.instance, peer.host, cause)
