"""The server of the rendezvous store: keys and values on one port, for processes that hold its secret.

One thread serves all connections. An unauthenticated connection receives 64 bytes without information and is closed
after 5 seconds. Standard library only: a launcher uses it without torch.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from typing import Callable, Dict, Generator, List, Optional, Sequence, Set

from _pod import store_protocol as protocol
from _pod.activation import RENDEZVOUS, SECRET
from _pod.store_protocol import HANDSHAKE_S, Channel, detect_dead_peer

_MAX_UNAUTHENTICATED = 512  # beyond it the oldest unauthenticated connection is closed
_MAX_REPORTED = 16  # rejected addresses that are reported on stderr
_JOIN_THREAD_S = 5.0
_READ_BYTES = 1 << 16

_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


class StoreServer:
    """A server that runs from construction until `close`. The keys are kept in memory."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of the address of `host`, which clients must be able to reach, and on no other.

        Raises:
            OSError: the address cannot be resolved or bound.
        """
        secret = protocol.new_secret()
        self._secret = bytes.fromhex(secret)
        self._listener = _listen(host)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        # A process with these variables may join: keep them secret.
        self.environment: Dict[str, str] = {RENDEZVOUS: self.address, SECRET: secret}
        self._values: Dict[bytes, bytes] = {}
        self._waiters: Dict[bytes, Set[_Connection]] = {}  # by missing key
        self._unauthenticated: Dict[_Connection, float] = {}  # deadlines, oldest first
        self._connections: Set[_Connection] = set()
        self._reported: Set[str] = set()
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Close the port and all connections, and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.send(b"x")
        self._thread.join(_JOIN_THREAD_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close this process's file descriptors only: a forked child has no server thread to stop."""
        self._is_closed = True
        self._selector.close()
        for each in (self._listener, self._waker, self._woken, *(each.socket for each in self._connections)):
            each.close()

    def _serve(self) -> None:
        while not self._is_closed:
            deadline = next(iter(self._unauthenticated.values()), None)
            events = self._selector.select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for key, _ in events:
                if key.data is not None:
                    key.data()
            now = time.monotonic()
            for connection in [each for each, deadline in self._unauthenticated.items() if deadline <= now]:
                self._reject(connection)

    def _accept(self) -> None:
        try:
            accepted, (address, *_) = self._listener.accept()
        except OSError:  # the client is gone, or no file descriptor is free until a connection is closed
            time.sleep(0.01)
            self._limit_unauthenticated(0)
            return
        self._limit_unauthenticated(_MAX_UNAUTHENTICATED - 1)
        accepted.setblocking(False)
        with contextlib.suppress(OSError):  # the client is gone, which the first event reports as well
            detect_dead_peer(accepted)
        connection = _Connection(accepted, address)
        connection.handler = self._handle(connection)
        connection.needed_bytes = next(connection.handler)
        self._connections.add(connection)
        self._unauthenticated[connection] = time.monotonic() + HANDSHAKE_S
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._on_event(connection))

    def _limit_unauthenticated(self, most: int) -> None:
        while len(self._unauthenticated) > most:
            self._reject(next(iter(self._unauthenticated)))

    def _reject(self, connection: _Connection) -> None:
        if connection.address not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(connection.address)
            with contextlib.suppress(OSError):  # stderr is closed
                sys.stderr.write(
                    f"store {self.address}: rejected {connection.address}, which does not have the secret\n"
                )
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._end_wait(connection)
        self._connections.discard(connection)
        self._unauthenticated.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _on_event(self, connection: _Connection) -> None:
        """Send what is unsent, else read and handle what has arrived."""
        if connection not in self._connections:  # dropped by an earlier event of the same round
            return
        try:
            if not connection.unsent:
                data = connection.socket.recv(_READ_BYTES)
                if not data:
                    raise ConnectionError("closed by the client")
                connection.received += data
            while self._flush(connection) and len(connection.received) >= connection.needed_bytes:
                content = bytes(connection.received[: connection.needed_bytes])
                del connection.received[: connection.needed_bytes]
                connection.needed_bytes = connection.handler.send(content)
        except BlockingIOError:
            return
        except StopIteration:
            self._reject(connection)
        except (OSError, ValueError, TypeError, LookupError, struct.error):  # closed, or a malformed message
            self._drop(connection)

    def _flush(self, connection: _Connection) -> bool:
        """Return whether everything is sent; until then nothing is read from the connection."""
        if connection.unsent:
            with contextlib.suppress(BlockingIOError):
                del connection.unsent[: connection.socket.send(connection.unsent)]
            events = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
            key = self._selector.get_key(connection.socket)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)
        return not connection.unsent

    def _handle(self, connection: _Connection) -> Generator[int, bytes, None]:
        """Authenticate a connection and answer its requests.

        Yields the number of bytes needed next; returns if authentication fails.
        """
        client_nonce = yield protocol.NONCE_BYTES
        nonce = os.urandom(protocol.NONCE_BYTES)
        connection.unsent += nonce + protocol.proof(self._secret, protocol.SERVER, client_nonce, nonce)
        client_proof = yield protocol.PROOF_BYTES
        if not hmac.compare_digest(client_proof, protocol.proof(self._secret, protocol.CLIENT, client_nonce, nonce)):
            return
        del self._unauthenticated[connection]
        incoming, connection.outgoing = (
            Channel(self._secret, sender, client_nonce, nonce) for sender in (protocol.CLIENT, protocol.SERVER)
        )
        while True:
            (length,) = protocol.HEADER.unpack((yield protocol.HEADER.size))
            if not protocol.PROOF_BYTES <= length <= protocol.MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            verb, *fields = incoming.unpack((yield length))
            response = _VERBS[verb](self, connection, *fields)
            if response is not None:
                connection.respond(response)

    def _set(self, connection: _Connection, key: bytes, value: bytes) -> List[bytes]:
        self._store(key, value)
        return []

    def _get(self, connection: _Connection, *keys: bytes) -> Sequence[bytes]:
        """Return the values of the existing keys."""
        return [self._values[key] for key in keys if key in self._values]

    def _add(self, connection: _Connection, key: bytes, amount: bytes) -> List[bytes]:
        total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
        self._store(key, total)
        return [total]

    def _swap(self, connection: _Connection, key: bytes, expected: bytes, desired: bytes) -> List[bytes]:
        """As torch's `Store.compare_set`: a missing key matches an empty `expected` only."""
        current = self._values.get(key)
        if (current or b"") != expected:
            return [expected if current is None else current]
        self._store(key, desired)
        return [desired]

    def _delete(self, connection: _Connection, key: bytes) -> List[bytes]:
        return [] if self._values.pop(key, None) is None else [key]

    def _count(self, connection: _Connection) -> List[bytes]:
        return [str(len(self._values)).encode()]

    def _await(self, connection: _Connection, number: bytes, *keys: bytes) -> Optional[List[bytes]]:
        """Respond with the missing keys once none is missing, or once one of the first `number` keys exists."""
        unless, wanted = set(keys[: int(number)]), keys[int(number) :]
        connection.missing = dict.fromkeys(key for key in wanted if key not in self._values)
        connection.unless = unless
        if not connection.missing or any(key in self._values for key in unless):
            return list(connection.missing)
        for key in (*connection.missing, *unless):
            self._waiters.setdefault(key, set()).add(connection)
        connection.is_waiting = True
        return None

    def _cancel(self, connection: _Connection) -> Optional[List[bytes]]:
        """End a wait and respond to it; no response if the wait has ended meanwhile, as it was responded to then."""
        if not connection.is_waiting:
            return None
        self._end_wait(connection)
        return list(connection.missing)

    def _store(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for connection in self._waiters.pop(key, ()):
            connection.missing.pop(key, None)
            if not connection.missing or key in connection.unless:
                self._end_wait(connection)
                connection.respond(list(connection.missing))
                try:
                    self._flush(connection)
                except OSError:  # its own event drops the connection
                    connection.unsent.clear()

    def _end_wait(self, connection: _Connection) -> None:
        connection.is_waiting = False
        for key in (*connection.missing, *connection.unless):
            waiters = self._waiters.get(key)
            if waiters is not None:
                waiters.discard(connection)
                if not waiters:
                    del self._waiters[key]


class _Connection:
    """The state of one accepted connection."""

    handler: Generator[int, bytes, None]
    outgoing: Channel  # set by authentication

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.socket, self.address = accepted, address
        self.received, self.unsent = bytearray(), bytearray()
        self.needed_bytes = 0
        self.missing: Dict[bytes, None] = {}
        self.unless: Set[bytes] = set()
        self.is_waiting = False

    def respond(self, fields: Sequence[bytes]) -> None:
        self.unsent += self.outgoing.pack(fields)


_VERBS: Dict[bytes, Callable[..., Optional[Sequence[bytes]]]] = {
    protocol.SET: StoreServer._set,
    protocol.GET: StoreServer._get,
    protocol.ADD: StoreServer._add,
    protocol.SWAP: StoreServer._swap,
    protocol.DELETE: StoreServer._delete,
    protocol.COUNT: StoreServer._count,
    protocol.AWAIT: StoreServer._await,
    protocol.CANCEL: StoreServer._cancel,
}


def _listen(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)  # all ranks connect at the same time
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _close_in_forked_child() -> None:
    """A child has no server thread, and an inherited listener would keep the port open after `close`."""
    for server in list(_servers):
        server.close_sockets()


os.register_at_fork(after_in_child=_close_in_forked_child)
