"""This process's connection to the store of its pod, joining a group, and the options of the Gloo backend."""

from __future__ import annotations

import os
import socket
import string
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Iterator, List, Optional, Set, Tuple, Union

import torch.distributed

from _pod.activation import GENERATION, RENDEZVOUS, SECRET
from _pod.rendezvous import timeout_s
from _pod.store_client import StoreClient
from _pod.store_protocol import PeerFailed

MAX_JOIN_S = 60.0
FAILED = "failed"  # key suffix that a rank sets if it fails before it joins

_c10d: Any = torch.distributed  # its stubs lack half of the documented names

_store: Optional[Store] = None
_store_config = ("", "")  # address and secret of `_store`
_cancellable: Set[threading.Event] = set()


class Store(_c10d.Store):  # type: ignore[misc]
    """A `torch.distributed.Store` over one `StoreClient`, for every supported version of torch.

    A C++ process group does not keep the Python object alive: keep a reference to it as long as the group exists.
    Every method raises PeerFailed if the connection to the server is lost.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self.client = client

    def set(self, key: str, value: Union[str, bytes]) -> None:
        """Set the value of a key."""
        self.client.set(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key; wait for the key, and raise PeerFailed after `timeout`."""
        value = self.client.get(key)
        if value is None:
            self.wait([key])
            value = self.client.get(key)
        return value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return self.client.add(key, amount)

    def check(self, keys: List[str]) -> bool:
        """Return whether all keys exist."""
        return self.client.has(keys)

    def compare_set(self, key: str, expected: Union[str, bytes], desired: Union[str, bytes]) -> bytes:
        """Set `desired` if the current value is `expected`; return the value afterwards."""
        return self.client.swap(key, _as_bytes(expected), _as_bytes(desired))

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        """Wait until all keys exist; raise PeerFailed after `timeout`."""
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        missing = self.client.wait(keys, timeout_s)
        if missing:
            reason = "cancelled while waiting" if self.client.cancelled.is_set() else f"waited {timeout_s:g} s"
            raise PeerFailed(f"{reason} for {', '.join(missing)} in the store")

    def delete_key(self, key: str) -> bool:
        """Delete a key and return whether it existed."""
        return self.client.delete(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self.client.count()

    def clone(self) -> Store:
        """Return this object: it is thread-safe."""
        return self


def _as_bytes(value: Union[str, bytes]) -> bytes:
    return value.encode() if isinstance(value, str) else value


@contextmanager
def cancellable() -> Iterator[threading.Event]:
    """Yield an event for the connection to the store; within the block `cancel_all` sets it, from any thread."""
    cancelled = threading.Event()
    _cancellable.add(cancelled)
    try:
        yield cancelled
    finally:
        _cancellable.discard(cancelled)
        if _store is not None:
            _store.client.cancelled = threading.Event()


def cancel_all() -> None:
    """End all waits of this process for the store."""
    for cancelled in list(_cancellable):
        cancelled.set()


def open_client(cancelled: threading.Event) -> Optional[Tuple[Store, str]]:
    """Return this process's connection to the store, whose waits `cancelled` ends, and its address; None if closed."""
    config = os.environ.get(RENDEZVOUS, ""), os.environ.get(SECRET, "")
    if _store is None or _store_config != config or not _store.client.is_open:
        return None
    _store.client.cancelled = cancelled
    return _store, config[0]


def client(size: int, cancelled: Optional[threading.Event] = None) -> Tuple[Store, str]:
    """Return this process's connection to the store, and the store's address; connect if necessary.

    Raises:
        PeerFailed: the server does not answer, or `cancelled` was set.
        RuntimeError: a variable is missing or invalid, or the server has a different secret.
    """
    global _store, _store_config
    config = address, secret = os.environ.get(RENDEZVOUS, ""), os.environ.get(SECRET, "")
    for name, value in ((RENDEZVOUS, address), (SECRET, secret)):
        if not value:
            raise RuntimeError(
                f"{name} is not set, and {size} processes cannot form a group without it: the launcher must open a"
                " store (raypod does; in plain Python _pod.wires.StoreServer) and pass on its `environment`"
            )
    cancelled = cancelled or threading.Event()
    if open_client(cancelled) is None:
        host, port = split_address(address)
        if len(secret) % 2 or set(secret) - set(string.hexdigits):
            raise RuntimeError(f"{SECRET} is not a store's secret: it must consist of pairs of hexadecimal digits")
        if _store is not None:
            _store.client.close()
        try:
            _store = Store(StoreClient(host, port, secret, min(timeout_s(), MAX_JOIN_S), cancelled))
        except PeerFailed as error:
            raise PeerFailed(f"{RENDEZVOUS}={address}: {error}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{RENDEZVOUS}={address}, {SECRET}: {error}") from error
        _store_config = config
    assert _store is not None, "it was open or is a new one"
    return _store, address


def detach() -> Optional[Store]:
    """Return the open connection, if any, for the caller to close or keep; the next `client` call makes a new one."""
    global _store
    store, _store = _store, None
    return store


def wait_for_ranks(store: Store, key: str, where: str, rank: int, size: int, join_s: float) -> None:
    """Announce this rank under `key` and wait until all ranks have. Gloo's own wait does not name the missing ranks.

    Args:
        where: describes the group in errors.

    Raises:
        PeerFailed: a rank is missing after `join_s` seconds or has failed, or another thread cancelled the wait.
        RuntimeError: this rank was announced before.
    """
    keys, failed = [f"{key}/{other}" for other in range(size)], f"{key}/{FAILED}"
    if store.client.add(keys[rank], 1) > 1:
        raise RuntimeError(
            f"rank {rank} {where} has joined before under {key!r}: restarted processes need a new {GENERATION}"
        )
    missing = [int(each.rpartition("/")[2]) for each in store.client.wait(keys, join_s, unless=[failed])]
    if not missing:
        return
    if store.client.cancelled.is_set():
        raise PeerFailed(f"rank {rank} {where}: cancelled before rank {missing[0]} joined")
    if store.client.has([failed]):
        raise PeerFailed(f"rank {rank} {where}: another rank failed before it joined")
    store.client.delete(keys[rank])  # this rank may retry, and must not count as present meanwhile
    ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
    raise PeerFailed(f"rank {rank} waited {join_s:g} s for {ranks} {where}")


def gloo_options(address: str, wait_s: float) -> Any:
    """Return the Gloo options: bind to the interfaces of GLOO_SOCKET_IFNAME, else to the route to the rendezvous."""
    gloo = _c10d.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        devices = [gloo.create_device(interface=name) for name in interfaces.split(",")]
    else:
        devices = [gloo.create_device(hostname=_own_address(*split_address(address)))]
    options = gloo._Options()
    options._devices = devices
    options._timeout = timedelta(seconds=wait_s)
    options._threads = 2 * len(devices)
    return options


def _own_address(host: str, port: int) -> str:
    """Return this host's address on the route to the rendezvous. Connecting a datagram socket sends no packet."""
    family, _, _, _, destination = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(destination)
        return str(probe.getsockname()[0])


def split_address(address: str) -> Tuple[str, int]:
    """Return host and port of "host:port"; RuntimeError if it is malformed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RuntimeError(f"{RENDEZVOUS}={address!r} is not host:port")
    return host.strip("[]"), int(port)
