"""Named process groups over Gloo, bounded in time, for the processes of one emulated pod; the connection to its store.

They replace the IPU-Links and the MPI connections of a real pod. A launcher opens one store (`StoreServer`), keeps it
open, and passes these environment variables to all processes:

    EMULATED_POD_RENDEZVOUS   "host:port" of the store
    EMULATED_POD_SECRET       the secret by which the store authenticates the processes of this pod
    EMULATED_POD_GENERATION   prefix of all keys (default "0"); restarted processes need a new one
    EMULATED_POD_TIMEOUT_S    timeout of every wait in seconds (default 300); joining a group waits at most 60 s of it,
                              unless the caller allows more

`GLOO_SOCKET_IFNAME` selects the interface as for torch.distributed. Without it the connections use the address from
which this process reaches the rendezvous, so that they do not depend on how the host name resolves.
"""

from __future__ import annotations

import atexit
import os
import socket
import string
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union
from weakref import WeakSet

import torch
import torch.distributed

from _pod import rendezvous, telemetry
from _pod.activation import GENERATION, RENDEZVOUS, SECRET, TIMEOUT_S
from _pod.rendezvous import timeout_s
from _pod.store_client import StoreClient
from _pod.store_protocol import PeerFailed
from _pod.store_server import StoreServer as StoreServer  # for programs without a launcher

_c10d: Any = torch.distributed  # its stubs lack half of the documented names

_MAX_JOIN_S = 60.0
_FAILED = "failed"  # key suffix that a rank sets if it fails before it joins

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
        self.client.set(key, _encoded(value))

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
        return self.client.swap(key, _encoded(expected), _encoded(desired))

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


def _encoded(value: Union[str, bytes]) -> bytes:
    return value.encode() if isinstance(value, str) else value


@contextmanager
def cancellable_waits() -> Iterator[threading.Event]:
    """Yield an event for the connection to the store; within the block `cancel_waits` sets it, from any thread."""
    cancelled = threading.Event()
    _cancellable.add(cancelled)
    try:
        yield cancelled
    finally:
        _cancellable.discard(cancelled)
        if _store is not None:
            _store.client.cancelled = threading.Event()


def cancel_waits() -> None:
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


def connection_to_store(size: int, cancelled: Optional[threading.Event] = None) -> Tuple[Store, str]:
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
            _store = Store(StoreClient(host, port, secret, min(timeout_s(), _MAX_JOIN_S), cancelled))
        except PeerFailed as error:
            raise PeerFailed(f"{RENDEZVOUS}={address}: {error}") from error
        except RuntimeError as error:
            raise RuntimeError(f"{RENDEZVOUS}={address}, {SECRET}: {error}") from error
        _store_config = config
    assert _store is not None, "it was open or is a new one"
    return _store, address


def detach_store() -> Optional[Store]:
    """Return the open connection, if any, for the caller to close or keep; the next use makes a new one."""
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
    keys, failed = [f"{key}/{other}" for other in range(size)], f"{key}/{_FAILED}"
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


_MAX_TAGS = 1 << 20  # Gloo uses the top bits of a slot for its own collectives

_lock = threading.RLock()
_groups: Dict[str, Group] = {}
_joins: Dict[str, int] = {}  # number of joins per group: each join uses new keys
_inherited: List[Any] = []  # the parent's connections, which a forked child must neither use nor destroy


def connect(name: str, rank: int, size: int, join_s: Optional[float] = None) -> Group:
    """Join the group `name` as `rank` of `size` and return it once all ranks have joined.

    Later calls return the same group. A group of one rank needs no rendezvous.

    Args:
        join_s: timeout in seconds, by default min(60, EMULATED_POD_TIMEOUT_S). A call may be repeated after a timeout.

    Raises:
        PeerFailed: some ranks (named) have not joined in time, or a rank called `abandon` before it joined.
        RuntimeError: the rendezvous is not set or rejects this process, or the rank is taken.
    """
    if not 0 <= rank < size:
        raise RuntimeError(f"rank {rank} of group {name!r} is not within 0..{size - 1}")
    with _lock:
        group = _groups.get(name)
        if group is None:
            group = _groups[name] = _join(name, rank, size, join_s)
        if (group.rank, group.size) != (rank, size):
            raise RuntimeError(
                f"this process is rank {group.rank} of {group.size} in group {name!r}; it cannot be rank {rank} of"
                f" {size} too"
            )
        return group


def abandon(name: str, rank: int, size: int, reason: str) -> None:
    """Report to the other ranks that this one has failed, whether it has joined the group `name` or not.

    Their current and later waits in this group raise PeerFailed at once instead of after the timeout. The group is
    broken afterwards. Opens no connection: the store may be the process whose loss is the reason.
    """
    with _lock:
        group = _groups.get(name)
        if group is not None:
            group.abandon(reason)
            return
        with suppress(RuntimeError), cancellable_waits() as cancelled:  # without the store the others wait
            opened = open_client(cancelled) if size > 1 else None
            if opened is not None:
                (connection, address), prefix = opened, _prefix(name)
                connection.add(f"{prefix}/{_joins.get(address + prefix, 0) + 1}/joined/{_FAILED}", rank + 1)


def abandon_all(reason: str) -> None:
    """Abort every wait of this process, from any thread: it raises PeerFailed, here and in the peers.

    Takes no lock: a thread that joins a group holds it.
    """
    cancel_waits()
    for group in list(_groups.values()):
        group.abandon(reason)


def disconnect(name: str) -> None:
    """Close the group `name`, if this process has joined it."""
    with _lock:
        group = _groups.pop(name, None)
        if group is not None:
            group.close()


def disconnect_broken(name: str) -> None:
    """Close the group `name` if it is broken, so that `connect` joins a new one."""
    with _lock:
        group = _groups.get(name)
        if group is not None and group.is_broken:
            disconnect(name)


def close() -> None:
    """Close every group and the connection to the store. Idempotent; runs at exit too."""
    with _lock:
        for name in list(_groups):
            disconnect(name)
        connection = detach_store()
        if connection is not None:
            connection.client.close()


atexit.register(close)
rendezvous.register(abandon_all, close)


class Group:
    """The connections between the ranks of one group: point-to-point transfers, broadcast and barrier.

    Independent of torch's default process group. After the first failure the group is broken: the peers detect it at
    once, and every later use raises PeerFailed.
    """

    def __init__(
        self, name: str, rank: int, size: int, backend: Any, wait_s: float, store: Optional[Store] = None
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        # Each rank starts with its next neighbour, so that not all send to rank 0 first.
        self.peers = [(rank + distance) % size for distance in range(1, size)]
        self._backend = backend  # a ProcessGroupGloo; None in a group of one rank, and after the end
        self._store = store  # the backend uses it without keeping it alive
        self.wait_s = wait_s
        self._broken_by = ""
        self._sequence = 0
        self.closes_with: WeakSet[Any] = WeakSet()  # these are closed with it, also when it breaks, from any thread

    @property
    def is_broken(self) -> bool:
        """Whether the group has failed, was abandoned or closed."""
        return bool(self._broken_by)

    def next_tag(self) -> int:
        """Return a tag for one collective operation: equal on all ranks if they call in the same order."""
        self._sequence = (self._sequence + 1) % _MAX_TAGS
        return self._sequence

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start to send a contiguous tensor of any dtype; it must not change until `Transfer.wait` returns."""
        return Transfer(self, self._start("send", tensor, peer, tag), tensor, f"sending to rank {peer}")

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Start to receive into a contiguous tensor; the sender's must have the same size in bytes."""
        return Transfer(self, self._start("recv", tensor, peer, tag), tensor, f"receiving from rank {peer}")

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [size, *shape]; same shape and dtype on all. For small tensors."""
        table = row.new_empty(self.size, *row.shape)
        table[self.rank] = row
        tag = _MAX_TAGS + self.next_tag()  # a separate range: ranks out of step wait instead of mixing up sizes
        transfers = [self.receive(table[peer], peer, tag) for peer in self.peers]
        wait_all(transfers + [self.send(table[self.rank], peer, tag) for peer in self.peers])
        return table

    def gather_numbers(self, numbers: Sequence[int]) -> List[List[int]]:
        """Return the integers of all ranks, by rank; all ranks pass the same number of integers."""
        return [[int(number) for number in row] for row in self.gather(torch.tensor(numbers, dtype=torch.int64))]

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """Copy root's contiguous tensor of any dtype bit by bit into that of every rank."""
        if self.size > 1 and tensor.numel():
            options = _c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._run(lambda backend: backend.broadcast([as_bytes(tensor)], options), f"broadcast from rank {root}")

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.size > 1:
            self._run(lambda backend: backend.barrier(), "barrier")

    def abandon(self, reason: str) -> None:
        """Mark the group as broken and close the connections, which the peers detect."""
        self._broken_by = self._broken_by or reason
        self._close_connections()

    def close(self) -> None:
        """Release the backend."""
        self._backend = None
        self._broken_by = self._broken_by or "it was closed"
        for each in list(self.closes_with):
            each.close()

    def wait_for(self, work: Any, doing: str) -> None:
        """Wait for a work handle of Gloo, if there is one, within the group's timeout."""
        if work is None:
            return
        start = time.monotonic()
        try:
            with telemetry.waiting(doing):
                work.wait(timedelta(seconds=self.wait_s))
        except RuntimeError as error:
            raise self.fail(doing, error, time.monotonic() - start) from error

    def fail(self, doing: str, cause: Exception, waited_s: float) -> PeerFailed:
        """Mark the group as broken, close the connections and return the error to raise."""
        if waited_s >= self.wait_s * 0.99:
            reason = f"waited {waited_s:.3g} s ({TIMEOUT_S}={self.wait_s:g})"
        else:
            reason = "lost the connection: a peer has ended, failed or timed out"
        self._broken_by = f"{doing} failed earlier"
        self._close_connections()
        return PeerFailed(f"rank {self.rank} of {self.size} in group {self.name!r}, {doing}: {reason} [{cause}]")

    def _close_connections(self) -> None:
        """Close the connections to all peers, so that they do not wait for this rank until their timeout.

        Gloo closes a connection when a wait times out, and all versions of torch offer no other way. Releasing the
        backend is not enough: the buffers of abandoned transfers keep it alive.
        """
        backend, self._backend = self._backend, None
        for each in list(self.closes_with):
            each.close()
        for peer in self.peers if backend is not None else ():
            with suppress(RuntimeError):  # the intended timeout, or a connection that is closed already
                backend.recv([torch.empty(1, dtype=torch.uint8)], peer, 2 * _MAX_TAGS).wait(timedelta(milliseconds=1))

    def _start(self, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        if not tensor.numel():
            return None
        try:
            return getattr(self.open_backend(), verb)([as_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            if self._broken_by:
                raise
            raise self.fail(f"{verb} with rank {peer}", error, 0.0) from error

    def _run(self, start: Any, doing: str) -> None:
        backend, began = self.open_backend(), time.monotonic()
        try:
            with telemetry.waiting(doing):
                start(backend).wait()
        except RuntimeError as error:
            raise self.fail(doing, error, time.monotonic() - began) from error

    def open_backend(self) -> Any:
        """Return Gloo's backend; PeerFailed if the group is broken or closed."""
        if self._broken_by or self._backend is None:
            kind = PeerFailed if self._broken_by else RuntimeError
            raise kind(f"group {self.name!r} is not usable: {self._broken_by or 'it has one rank only'}")
        return self._backend


class Transfer:
    """A transfer in progress. It keeps its tensor alive."""

    __slots__ = ("_doing", "_group", "_tensor", "_work")

    def __init__(self, group: Group, work: Any, tensor: torch.Tensor, doing: str) -> None:
        self._group, self._work, self._tensor, self._doing = group, work, tensor, doing

    def wait(self) -> None:
        """Wait until the tensor has arrived, or may be reused; PeerFailed at the timeout or if the peer is lost."""
        self._group.wait_for(self._work, self._doing)


def wait_all(transfers: Sequence[Transfer]) -> None:
    """Wait for every transfer."""
    for transfer in transfers:
        transfer.wait()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 view of a contiguous tensor: Gloo transfers it unchanged, whatever the dtype."""
    assert tensor.is_contiguous(), "the bytes would be those of a copy"
    return tensor.detach().reshape(-1).view(torch.uint8)


def _prefix(name: str) -> str:
    return f"{os.environ.get(GENERATION, '0')}/{name}"


def _join(name: str, rank: int, size: int, join_s: Optional[float]) -> Group:
    wait_s = timeout_s()
    if size == 1:
        return Group(name, rank, size, None, wait_s)
    with cancellable_waits() as cancelled, telemetry.waiting():
        connection, address = connection_to_store(size, cancelled)
        prefix = _prefix(name)
        count = _joins.get(address + prefix, 0) + 1
        join_s = min(wait_s, _MAX_JOIN_S) if join_s is None else join_s
        where = f"of group {name!r} at {address}"
        wait_for_ranks(connection, f"{prefix}/{count}/joined", where, rank, size, join_s)
        _joins[address + prefix] = count
        prefix += f"/{count}"
        prefixed = _c10d.PrefixStore(f"{prefix}/wires", connection)
        backend = _c10d.ProcessGroupGloo(prefixed, rank, size, gloo_options(address, wait_s))
        # A rank that leaves early would close connections that others are still establishing.
        wait_for_ranks(connection, f"{prefix}/wired", where, rank, size, join_s)
    return Group(name, rank, size, backend, wait_s, connection)


def _reset_in_forked_child() -> None:
    """A forked child (a DataLoader worker) has copies of its parent's sockets, but not the threads that serve them.

    Using the groups would steal the parent's data, and destroying them would wait for threads that do not exist.
    """
    global _lock
    _lock = threading.RLock()
    _inherited.append((dict(_groups), detach_store()))
    _groups.clear()
    _joins.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
