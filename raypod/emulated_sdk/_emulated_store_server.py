"""The store at which a pod's processes meet: keys and values on one port, for those alone that know its secret.

One thread serves all. A stranger gets 64 bytes that tell it nothing, and 5 seconds; it disturbs nobody. Standard
library alone, so that a launcher needs no torch to hold it.
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
    Seal,
    new_secret,
    notice_silence,
    proof,
)

_MOST_STRANGERS = 512  # connections that have not proved anything yet; the oldest makes room
_MOST_TOLD = 16  # addresses of strangers that are said on stderr
_ENDS_WITHIN_S = 5.0
_READ_BYTES = 1 << 16

_servers: weakref.WeakSet[StoreServer] = weakref.WeakSet()


class StoreServer:
    """Serves from its birth until `close`; all keys are gone with it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on one address: that of `host`, the name by which the others reach this one. `port` 0: any.

        OSError if it cannot be resolved or listened on.
        """
        secret = new_secret()
        self._secret = bytes.fromhex(secret)
        self._listener = _listen(host, port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        # What leads there; whoever has it may join. `repr` does not show it.
        self.environment: Dict[str, str] = {"EMULATED_POD_RENDEZVOUS": self.address, "EMULATED_POD_SECRET": secret}
        self._values: Dict[bytes, bytes] = {}
        self._awaited: Dict[bytes, Set[_Guest]] = {}  # by key that is not there yet
        self._strangers: Dict[_Guest, float] = {}  # and until when; in the order of their coming
        self._guests: Set[_Guest] = set()  # strangers included
        self._told: Set[str] = set()
        self._is_ending = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Close the port and all connections, and end the thread. Idempotent."""
        if self._is_ending:
            return
        self._is_ending = True
        self._waker.send(b"x")
        self._thread.join(_ENDS_WITHIN_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Let go of every descriptor of this process, and of nothing else: a forked child does no more."""
        self._is_ending = True
        self._selector.close()
        for each in (self._listener, self._waker, self._woken, *(guest.connection for guest in self._guests)):
            each.close()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_ending:
            first = next(iter(self._strangers.values()), None)
            events = self._selector.select(None if first is None else max(0.0, first - time.monotonic()))
            for key, _ in events:
                if key.data is not None:
                    key.data()
            now_s = time.monotonic()
            for guest in [each for each, until_s in self._strangers.items() if until_s <= now_s]:
                self._turn_away(guest)

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError:  # it has gone again; or no descriptors are left, until a stranger's is free
            time.sleep(0.01)
            self._make_room(0)
            return
        self._make_room(_MOST_STRANGERS - 1)
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it has gone again, which its first event says, too
            notice_silence(connection)
        guest = _Guest(connection, address)
        guest.conversation = self._converse(guest)
        guest.needs = next(guest.conversation)
        self._guests.add(guest)
        self._strangers[guest] = time.monotonic() + HANDSHAKE_S
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._go_on(guest))

    def _make_room(self, most: int) -> None:
        while len(self._strangers) > most:
            self._turn_away(next(iter(self._strangers)))

    def _turn_away(self, guest: _Guest) -> None:
        if guest.address not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(guest.address)
            with contextlib.suppress(OSError):  # nobody listens there any more
                sys.stderr.write(f"store {self.address}: turned away {guest.address}, which does not know the secret\n")
        self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._forget_wait(guest)
        self._guests.discard(guest)
        self._strangers.pop(guest, None)
        self._selector.unregister(guest.connection)
        guest.connection.close()

    def _go_on(self, guest: _Guest) -> None:
        """Send what is to be sent, else hear what it says."""
        if guest not in self._guests:  # dropped a moment ago
            return
        try:
            if not guest.unsent:
                data = guest.connection.recv(_READ_BYTES)
                if not data:
                    raise ConnectionError("it has ended")
                guest.received += data
            while self._flush(guest) and len(guest.received) >= guest.needs:
                taken = bytes(guest.received[: guest.needs])
                del guest.received[: guest.needs]
                guest.needs = guest.conversation.send(taken)
        except BlockingIOError:
            return
        except StopIteration:
            self._turn_away(guest)
        except (OSError, ValueError, TypeError, LookupError, struct.error):  # it has ended, or talks nonsense
            self._drop(guest)

    def _flush(self, guest: _Guest) -> bool:
        """Whether all is sent; nothing more is heard of who does not listen."""
        if guest.unsent:
            with contextlib.suppress(BlockingIOError):
                del guest.unsent[: guest.connection.send(guest.unsent)]
            events = selectors.EVENT_WRITE if guest.unsent else selectors.EVENT_READ
            key = self._selector.get_key(guest.connection)
            if key.events != events:
                self._selector.modify(guest.connection, events, key.data)
        return not guest.unsent

    def _converse(self, guest: _Guest) -> Generator[int, bytes, None]:
        """All that is said to one guest; yields how many bytes it needs next, and ends for a stranger."""
        theirs = yield NONCE_BYTES
        own = os.urandom(NONCE_BYTES)
        guest.unsent += own + proof(self._secret, SERVER, theirs, own)
        said = yield PROOF_BYTES
        if not hmac.compare_digest(said, proof(self._secret, CLIENT, theirs, own)):
            return
        del self._strangers[guest]
        incoming, guest.seal = (Seal(self._secret, sender, theirs, own) for sender in (CLIENT, SERVER))
        while True:
            (length,) = HEAD.unpack((yield HEAD.size))
            if not PROOF_BYTES <= length <= MOST_BYTES:
                raise ValueError(f"a message of {length} bytes")
            verb, *words = incoming.open((yield length))
            answer = _VERBS[verb](self, guest, *words)
            if answer is not None:
                guest.answer(answer)

    # ---- what can be asked for -------------------------------------------------------------------------------------

    def _set(self, guest: _Guest, key: bytes, value: bytes) -> List[bytes]:
        self._keep(key, value)
        return []

    def _get(self, guest: _Guest, *keys: bytes) -> Sequence[bytes]:
        """Their values; fewer than keys as long as one is not there."""
        return [self._values[key] for key in keys if key in self._values]

    def _add(self, guest: _Guest, key: bytes, amount: bytes) -> List[bytes]:
        total = str(int(self._values.get(key, b"0")) + int(amount)).encode()
        self._keep(key, total)
        return [total]

    def _swap(self, guest: _Guest, key: bytes, expected: bytes, desired: bytes) -> List[bytes]:
        """As `Store.compare_set` of torch: nothing is expected of a key that is not there."""
        current = self._values.get(key)
        if (current or b"") != expected:
            return [expected if current is None else current]
        self._keep(key, desired)
        return [desired]

    def _delete(self, guest: _Guest, key: bytes) -> List[bytes]:
        return [] if self._values.pop(key, None) is None else [key]

    def _count(self, guest: _Guest) -> List[bytes]:
        return [str(len(self._values)).encode()]

    def _await(self, guest: _Guest, number: bytes, *keys: bytes) -> Optional[List[bytes]]:
        """Answered, with the keys still missing, once none is, or one of the first `number` is there instead."""
        unless, wanted = set(keys[: int(number)]), keys[int(number) :]
        guest.missing = dict.fromkeys(key for key in wanted if key not in self._values)
        guest.unless = unless
        if not guest.missing or any(key in self._values for key in unless):
            return list(guest.missing)
        for key in (*guest.missing, *unless):
            self._awaited.setdefault(key, set()).add(guest)
        guest.is_waiting = True
        return None

    def _cancel(self, guest: _Guest) -> Optional[List[bytes]]:
        """The answer of a wait that is under way; none where it has been given already."""
        if not guest.is_waiting:
            return None
        self._forget_wait(guest)
        return list(guest.missing)

    def _keep(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for guest in self._awaited.pop(key, ()):
            guest.missing.pop(key, None)
            if not guest.missing or key in guest.unless:
                self._forget_wait(guest)
                guest.answer(list(guest.missing))
                try:
                    self._flush(guest)
                except OSError:  # its own event says so, too
                    guest.unsent.clear()

    def _forget_wait(self, guest: _Guest) -> None:
        guest.is_waiting = False
        for key in (*guest.missing, *guest.unless):
            waiting = self._awaited.get(key)
            if waiting is not None:
                waiting.discard(guest)
                if not waiting:
                    del self._awaited[key]


class _Guest:
    """Somebody who has connected."""

    conversation: Generator[int, bytes, None]
    seal: Seal  # of what is said to it, once it is no stranger

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.received, self.unsent = bytearray(), bytearray()
        self.needs = 0
        self.missing: Dict[bytes, None] = {}
        self.unless: Set[bytes] = set()
        self.is_waiting = False

    def answer(self, parts: Sequence[bytes]) -> None:
        self.unsent += self.seal.close(parts)


_VERBS: Dict[bytes, Callable[..., Optional[Sequence[bytes]]]] = {
    SET: StoreServer._set,
    GET: StoreServer._get,
    ADD: StoreServer._add,
    SWAP: StoreServer._swap,
    DELETE: StoreServer._delete,
    COUNT: StoreServer._count,
    AWAIT: StoreServer._await,
    CANCEL: StoreServer._cancel,
}


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on the one address."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(512)  # all ranks come at once
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _serve_nobody_in_a_forked_child() -> None:
    """The thread is not there, and a port that a loader's worker holds would outlive the server."""
    for server in list(_servers):
        server.close_sockets()


os.register_at_fork(after_in_child=_serve_nobody_in_a_forked_child)
