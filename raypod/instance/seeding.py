"""How a state reaches the instances that lack it: once, along a chain through their hosts.

Every instance passes each piece on while the next one arrives, so that the whole takes about as long as one transfer
over one link, whatever the number of hosts. Each connection is proved on both sides by a secret that the fleet hands
down for this one seeding; the bytes are proved by it at the end. Sockets are bound to the data network's address alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from raypod.errors import PeerLost

_PIECE_BYTES, _SMALL_BYTES = 1 << 18, 1 << 16  # every host of the chain adds the time of one piece
_NONCE_BYTES, _DIGEST = 32, "sha256"
_DIGEST_BYTES = 32
_HANDSHAKE_S = 5.0  # of whoever connects: a stranger that stays silent does not keep the chain waiting for longer
_UNREACHABLE_S = 10  # a peer whose host does not answer at all is given up after it
_HEAD = struct.Struct(">cI")  # of a message: its kind and its length
_SIZE, _PIECE, _END, _FAILED, _PATIENCE = b"S", b"P", b"E", b"F", b"W"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an instance listens for its predecessor."""

    instance: int
    host: str
    address: str
    port: int


@dataclasses.dataclass(frozen=True)
class Seeding:
    """Who hands the state to whom, made by the coordinator for one seeding and told to every instance.

    `places` are those of all instances, by index. Only `receivers` take part besides `root`.
    """

    root: int
    receivers: Tuple[int, ...]
    places: Tuple[Place, ...]
    secret: bytes = dataclasses.field(repr=False)

    @property
    def chain(self) -> Tuple[int, ...]:
        """The root, the receivers after it, then those before it: instances of a host stay side by side."""
        later = [each for each in sorted(self.receivers) if each > self.root]
        return (self.root, *later, *(each for each in sorted(self.receivers) if each < self.root))


def new_seeding(places: Sequence[Place], root: int = 0, receivers: Optional[Sequence[int]] = None) -> Seeding:
    """A seeding from instance `root` to `receivers` (default: all others), with a secret of its own."""
    chosen = range(len(places)) if receivers is None else receivers
    return Seeding(root, tuple(each for each in chosen if each != root), tuple(places), secrets.token_bytes(32))


class SeedingEnd:
    """One instance's end of a seeding; it listens from its birth until `close`."""

    def __init__(self, instance: int, host: str, address: str, timeout_s: float) -> None:
        """Listen on `address`, this host's in the data network; every single wait is bounded by `timeout_s`."""
        self._listener = socket.create_server((address, 0))
        self._open: List[socket.socket] = [self._listener]
        self._timeout_s = timeout_s
        self.place = Place(instance, host, address, self._listener.getsockname()[1])

    def give(self, seeding: Seeding, parts: Sequence[np.ndarray]) -> None:
        """As the root: hand `parts` (uint8 [bytes] each), one behind the other, to the first receiver.

        Raises:
            PeerLost: it cannot be reached, or is gone.
        """
        digest = hmac.new(seeding.secret, digestmod=_DIGEST)
        with self._pass_on(seeding) as successor:
            successor.put(_SIZE, sum(part.size for part in parts).to_bytes(8, "big"))
            for piece in _pieces(parts):
                digest.update(piece)
                successor.put(_PIECE, piece)
            successor.put(_END, digest.digest())

    def take(self, seeding: Seeding) -> np.ndarray:
        """As a receiver: the bytes of the root, uint8 [bytes]; meanwhile they are passed on to the next receiver.

        Raises:
            PeerLost: a predecessor, whichever in the chain, or the successor cannot be reached or is gone.
        """
        predecessor = seeding.places[seeding.chain[seeding.chain.index(self.place.instance) - 1]]
        with self._pass_on(seeding) as successor:
            try:
                with self._accept(seeding, predecessor) as upstream:
                    return _receive(upstream, seeding.secret, successor)
            except (OSError, EOFError) as error:
                cause = " ".join(str(error).split()) or type(error).__name__
                lost = _lost(self.place, predecessor, cause)
                successor.put(_FAILED, json.dumps(dataclasses.astuple(lost)).encode())
                raise lost from error

    def abandon(self) -> None:
        """From another thread: end every wait for the others, who are lost."""
        for each in list(self._open):
            with contextlib.suppress(OSError):  # it has ended by itself
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    @contextlib.contextmanager
    def _pass_on(self, seeding: Seeding) -> Any:
        """The way to the next in the chain, ended in order; what went wrong there is told when all is received."""
        chain = seeding.chain
        at = chain.index(self.place.instance) + 1
        successor = _Successor(self.place, seeding.places[chain[at]] if at < len(chain) else None, seeding.secret)
        successor.timeout_s = self._timeout_s
        successor.opened = self._open.append
        successor.start()
        try:
            yield successor
        except BaseException:
            successor.put(_FAILED, b"")
            raise
        finally:
            successor.join()  # bounded: each of its sends is
        if successor.error is not None:
            raise successor.error

    def _accept(self, seeding: Seeding, predecessor: Place) -> socket.socket:
        """The connection of the predecessor, proved. Whoever else connects is turned away."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, (address, *_) = self._listener.accept()
            except socket.timeout:
                raise socket.timeout(f"it has not connected within {self._timeout_s:g} s") from None
            if address == predecessor.address and _admit(connection, seeding.secret):
                connection.settimeout(self._timeout_s)
                _notice_silence(connection)
                self._open.append(connection)
                return connection
            connection.close()
            sys.stderr.write(f"seeding: turned away {address}, expected instance {predecessor.instance}\n")


class _Successor(threading.Thread):
    """Sends messages to the next in the chain, beside the receiving; to nobody at the end of the chain."""

    def __init__(self, own: Place, to: Optional[Place], secret: bytes) -> None:
        super().__init__(name="seeding", daemon=True)
        self._own, self._to, self._secret = own, to, secret
        self._messages: queue.SimpleQueue[Tuple[bytes, Any]] = queue.SimpleQueue()
        self.timeout_s = 0.0
        self.opened: Callable[[socket.socket], None] = lambda connection: None
        self.error: Optional[PeerLost] = None

    def put(self, kind: bytes, content: Any) -> None:
        """Queue a message; its content must not change any more."""
        self._messages.put((kind, content))

    def run(self) -> None:
        if self._to is None:
            return
        try:
            where = (self._to.address, self._to.port)
            with socket.create_connection(where, self.timeout_s, (self._own.address, 0)) as connection:
                self.opened(connection)
                _introduce(connection, self._secret)
                _notice_silence(connection)
                kind = b""
                while kind not in (_END, _FAILED):
                    kind, content = self._next()
                    connection.sendall(_HEAD.pack(kind, len(content)), socket.MSG_MORE)
                    connection.sendall(content)
        except (OSError, EOFError) as error:
            self.error = _lost(self._own, self._to, " ".join(str(error).split()) or type(error).__name__)

    def _next(self) -> Tuple[bytes, Any]:
        """The next message; one that asks for patience while there is none, so that only the first to wait gives up."""
        try:
            return self._messages.get(timeout=self.timeout_s / 4)
        except queue.Empty:
            return _PATIENCE, b""


def _pieces(parts: Sequence[np.ndarray]) -> Iterator[memoryview]:
    """Parts in pieces of a size that travels well: large ones divided, small ones together."""
    small: List[np.ndarray] = []
    for part in parts:
        if part.size < _SMALL_BYTES:
            small.append(part)
            if sum(each.size for each in small) < _PIECE_BYTES:
                continue
        if small:
            yield _view(np.concatenate(small))
            small = []
        if part.size >= _SMALL_BYTES:
            for first in range(0, part.size, _PIECE_BYTES):
                yield _view(part[first : first + _PIECE_BYTES])
    if small:
        yield _view(np.concatenate(small))


def _view(array: np.ndarray) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _receive(upstream: socket.socket, secret: bytes, successor: _Successor) -> np.ndarray:
    """All messages of the predecessor, each passed on as soon as it is here."""
    digest = hmac.new(secret, digestmod=_DIGEST)
    flat, filled = np.empty(0, dtype=np.uint8), 0
    while True:
        kind, length = _HEAD.unpack(_read(upstream, _HEAD.size))
        if kind == _PIECE:
            piece = _view(flat[filled : filled + length])
            _fill(upstream, piece)
            successor.put(kind, piece)
            digest.update(piece)
            filled += length
            continue
        content = _read(upstream, length)
        if kind == _PATIENCE:
            continue
        if kind == _FAILED:
            if not content:
                raise EOFError("it has given up")
            successor.put(kind, content)  # the whole chain tells the first cause
            raise PeerLost(*json.loads(content))
        successor.put(kind, content)
        if kind == _SIZE:
            flat = np.empty(int.from_bytes(content, "big"), dtype=np.uint8)
        elif filled != flat.size or not hmac.compare_digest(content, digest.digest()):
            raise EOFError("the bytes that it sent are not those of the root")
        else:
            return flat


def _introduce(connection: socket.socket, secret: bytes) -> None:
    """Prove to a receiver that this is its predecessor, and be proved that it is the receiver."""
    own = os.urandom(_NONCE_BYTES)
    connection.sendall(own)
    theirs, proof = _read(connection, _NONCE_BYTES), _read(connection, _DIGEST_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"receiver", own, theirs)):
        raise ConnectionError("who listens there does not know the secret of this seeding")
    connection.sendall(_proof(secret, b"sender", own, theirs))


def _admit(connection: socket.socket, secret: bytes) -> bool:
    """Whether who has connected knows the secret; it is proved to it, too."""
    connection.settimeout(_HANDSHAKE_S)
    try:
        theirs, own = _read(connection, _NONCE_BYTES), os.urandom(_NONCE_BYTES)
        connection.sendall(own + _proof(secret, b"receiver", theirs, own))
        return hmac.compare_digest(_read(connection, _DIGEST_BYTES), _proof(secret, b"sender", theirs, own))
    except (OSError, EOFError):
        return False


def _proof(secret: bytes, role: bytes, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
    return hmac.new(secret, role + sender_nonce + receiver_nonce, _DIGEST).digest()


def _notice_silence(connection: socket.socket) -> None:
    """End the connection when the other host does not answer any more, long before TCP itself would."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _UNREACHABLE_S)


def _read(connection: socket.socket, length: int) -> bytes:
    content = bytearray(length)
    _fill(connection, memoryview(content))
    return bytes(content)


def _fill(connection: socket.socket, place: memoryview) -> None:
    """Receive exactly as many bytes as there is room for; EOFError if the other side ends before."""
    while place:
        count = connection.recv_into(place)
        if not count:
            raise EOFError("it closed the connection")
        place = place[count:]


def _lost(own: Place, peer: Place, cause: str) -> PeerLost:
    return PeerLost(own.instance, own.host, peer.instance, peer.host, cause)
