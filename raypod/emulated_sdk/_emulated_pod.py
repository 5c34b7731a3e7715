"""How the processes of one emulated pod find each other: named groups of Gloo wires over one rendezvous store.

On a real pod the wires are IPU-Links and mpirun's connections (contract sections 6.4 and 8); here a launcher opens one
store (`StoreServer`), keeps it open, and hands down in the environment what leads there:

    EMULATED_POD_RENDEZVOUS   "host:port" of the store
    EMULATED_POD_SECRET       what only the processes of this pod know; the store answers nobody else
    EMULATED_POD_GENERATION   prefix of all keys (default "0"); a restarted fleet takes a new one
    EMULATED_POD_TIMEOUT_S    bound of every wait in seconds (default 300); joining a group waits at most 60 of them,
                              unless its ranks may have much to do before

`GLOO_SOCKET_IFNAME` chooses the interface as everywhere in torch; without it the wires use the address from which this
process reaches the rendezvous, so that nothing depends on what the host's name resolves to.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Dict, List, Optional, Sequence

import _emulated_rendezvous
import torch
import torch.distributed
from _emulated_rendezvous import (
    FAILED,
    GENERATION,
    LONGEST_JOIN_S,
    RENDEZVOUS,
    SECRET,
    TIMEOUT_S,
    timeout_s,
)
from _emulated_store import Store
from _emulated_store_protocol import PeerFailed
from _emulated_store_server import StoreServer

__all__ = [
    "GENERATION",
    "RENDEZVOUS",
    "SECRET",
    "TIMEOUT_S",
    "Group",
    "PeerFailed",
    "StoreServer",
    "Transfer",
    "abandon",
    "abandon_all",
    "as_bytes",
    "close",
    "connect",
    "cut",
    "disconnect",
    "disconnect_broken",
    "timeout_s",
]

_c10d: Any = torch.distributed  # whose stubs lack half of what its documentation names
_ROOM_OF_TAGS = 1 << 20  # Gloo keeps the top bits of a slot for its own collectives

_lock = threading.RLock()
_groups: Dict[str, Group] = {}
_joins: Dict[str, int] = {}  # how often this process has joined each group: the keys of closed ones are stale
_joining: Dict[str, threading.Event] = {}  # set to give up joining
_abandoned: List[Any] = []  # what a forked child must neither use nor destroy


def connect(name: str, rank: int, size: int, join_s: Optional[float] = None) -> Group:
    """Joins the group `name` as `rank` of `size` and returns it once all have; the same group at every later call.

    A group of one needs no rendezvous. RuntimeError if the rendezvous is missing or does not answer, if a rank does not
    join within `join_s`, by default min(60 s, EMULATED_POD_TIMEOUT_S) (the error names them; one may try again), if
    a rank has failed before it joined (`abandon`), or if the rank was taken before.
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
    """Tells the others that this rank has failed and will not do its part in the group `name`, joined or not.

    Who waits for it, or will, gets a RuntimeError at once instead of at its bound. The group is of no use afterwards.
    """
    with _lock:
        group = _groups.get(name)
        if group is not None:
            group.abandon(reason)
        elif size > 1 and os.environ.get(RENDEZVOUS):
            with suppress(RuntimeError):  # without the store they wait until their bound
                store, address = _emulated_rendezvous.client(size)
                prefix = _prefix(name)
                store.add(f"{prefix}/{_joins.get(address + prefix, 0) + 1}/joined/{FAILED}", rank + 1)


def abandon_all(reason: str) -> None:
    """Ends every wait of this process for others, from any thread: each gets a PeerFailed, here and at the peers.

    For whoever knows that a peer is silent, long before the waits reach their bound. Takes no lock: a thread that joins
    a group holds it.
    """
    for given_up in list(_joining.values()):
        given_up.set()
    for group in list(_groups.values()):
        group.abandon(reason)


def disconnect(name: str) -> None:
    """Closes the group `name`, if this process is in one."""
    with _lock:
        group = _groups.pop(name, None)
        if group is not None:
            group.close()


def disconnect_broken(name: str) -> None:
    """Closes the group `name` if it has failed or was abandoned, so that `connect` joins anew."""
    with _lock:
        group = _groups.get(name)
        if group is not None and group.is_broken:
            disconnect(name)


def close() -> None:
    """Closes every group and the store's client. Idempotent; runs at exit too."""
    with _lock:
        for name in list(_groups):
            disconnect(name)
        store = _emulated_rendezvous.forget()
        if store is not None:
            store.client.close()


atexit.register(close)


class Group:
    """The wires between the processes of one group: bounded point-to-point transfers, broadcast and barrier.

    Independent of torch's default process group. After the first failure it is broken for good: its peers see
    that at once, and every later use raises RuntimeError.
    """

    def __init__(
        self, name: str, rank: int, size: int, wires: Any, wait_s: float, store: Optional[Store] = None
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        # Everyone begins with its next neighbour, so that not all talk to rank 0 first.
        self.peers = [(rank + distance) % size for distance in range(1, size)]
        self._wires = wires  # a Gloo process group; None in a group of one, and after the end
        self._store = store  # which has to live as long as they do
        self._wait_s = wait_s
        self._broken = ""
        self._sequence = 0

    @property
    def is_broken(self) -> bool:
        """Whether it is of no use any more."""
        return bool(self._broken)

    def next_tag(self) -> int:
        """A tag for one collective operation: equal on all ranks because all call in the same order."""
        self._sequence = (self._sequence + 1) % _ROOM_OF_TAGS
        return self._sequence

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Starts to send a contiguous tensor of any dtype; it must stay unchanged until `Transfer.wait` returns."""
        return Transfer(self, self._start("send", tensor, peer, tag), tensor, f"sending to rank {peer}")

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Transfer:
        """Starts to receive into a contiguous tensor of the sender's size in bytes."""
        return Transfer(self, self._start("recv", tensor, peer, tag), tensor, f"receiving from rank {peer}")

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Everyone's tensors of one shape and dtype, [size, *shape], by rank. Meant for small ones: all go to all."""
        table = row.new_empty(self.size, *row.shape)
        table[self.rank] = row
        tag = _ROOM_OF_TAGS + self.next_tag()  # a kind of its own: ranks out of step wait instead of mixing up sizes
        transfers = [self.receive(table[peer], peer, tag) for peer in self.peers]
        transfers += [self.send(table[self.rank], peer, tag) for peer in self.peers]
        for transfer in transfers:
            transfer.wait()
        return table

    def gather_numbers(self, numbers: Sequence[int]) -> List[List[int]]:
        """Everyone's integers, by rank; all ranks bring equally many. For sizes that must be known beforehand."""
        return [[int(number) for number in row] for row in self.gather(torch.tensor(numbers, dtype=torch.int64))]

    def broadcast_(self, tensor: torch.Tensor, root: int) -> None:
        """Copies root's contiguous tensor into everyone's, bit by bit, whatever its dtype."""
        if self.size > 1 and tensor.numel():
            options = _c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            self._run(lambda wires: wires.broadcast([as_bytes(tensor)], options), f"the broadcast from rank {root}")

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            self._run(lambda wires: wires.barrier(), "the barrier")

    def abandon(self, reason: str) -> None:
        """Marks the group as broken and tells the peers."""
        self._broken = self._broken or reason
        self._cut()

    def close(self) -> None:
        """Drops the wires."""
        self._wires = None
        self._broken = self._broken or "it was closed"

    def fail(self, doing: str, cause: Exception, waited_s: float) -> PeerFailed:
        """Marks the group as broken, tells the peers, and returns the error to raise."""
        if waited_s >= self._wait_s * 0.99:
            reason = f"waited {waited_s:.3g} s ({TIMEOUT_S}={self._wait_s:g})"
        else:
            reason = "lost the connection: a peer has ended, failed or timed out"
        self._broken = f"{doing} failed earlier"
        self._cut()
        return PeerFailed(f"rank {self.rank} of {self.size} in group {self.name!r}, {doing}: {reason} [{cause}]")

    def _cut(self) -> None:
        """Closes the connections to all peers, so that those that wait for this rank need not wait until the bound.

        Gloo does that when a wait times out, and has no other way that all versions of torch offer; buffers of
        abandoned transfers would keep it alive.
        """
        wires, self._wires = self._wires, None
        for peer in self.peers if wires is not None else ():
            with suppress(RuntimeError):  # the time-out that is meant, or a connection that is closed already
                wires.recv([torch.empty(1, dtype=torch.uint8)], peer, 2 * _ROOM_OF_TAGS).wait(timedelta(milliseconds=1))

    def _start(self, verb: str, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        if not tensor.numel():
            return None
        try:
            return getattr(self._open_wires(), verb)([as_bytes(tensor)], peer, tag)
        except RuntimeError as error:
            if self._broken:
                raise
            raise self.fail(f"{verb} with rank {peer}", error, 0.0) from error

    def _run(self, start: Any, doing: str) -> None:
        wires, began = self._open_wires(), time.monotonic()
        try:
            start(wires).wait()
        except RuntimeError as error:
            raise self.fail(doing, error, time.monotonic() - began) from error

    def _open_wires(self) -> Any:
        if self._broken or self._wires is None:
            kind = PeerFailed if self._broken else RuntimeError
            raise kind(f"group {self.name!r} cannot be used any more: {self._broken or 'it has one rank only'}")
        return self._wires

    def wait_for(self, work: Any, doing: str) -> None:
        """Waits for one of Gloo's work handles, if there is one, within the group's bound."""
        if work is None:
            return
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=self._wait_s))
        except RuntimeError as error:
            raise self.fail(doing, error, time.monotonic() - began) from error


class Transfer:
    """A transfer under way. It keeps its tensor alive."""

    __slots__ = ("_doing", "_group", "_tensor", "_work")

    def __init__(self, group: Group, work: Any, tensor: torch.Tensor, doing: str) -> None:
        self._group, self._work, self._tensor, self._doing = group, work, tensor, doing

    def wait(self) -> None:
        """Returns when the tensor has arrived, or may be reused; RuntimeError at the bound or when the peer is gone."""
        self._group.wait_for(self._work, self._doing)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor: Gloo carries that for every dtype and moves the bits unchanged."""
    assert tensor.is_contiguous(), "a copy would go over the wire, or be received into and lost"
    return tensor.detach().reshape(-1).view(torch.uint8)


def cut(start: int, stop: int, pieces: int) -> List[slice]:
    """Cuts start..stop-1 into nearly equal slices; with fewer elements than pieces some are empty."""
    edges = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
    return [slice(low, high) for low, high in zip(edges, edges[1:])]


def _prefix(name: str) -> str:
    return f"{os.environ.get(GENERATION, '0')}/{name}"


def _join(name: str, rank: int, size: int, join_s: Optional[float]) -> Group:
    wait_s = timeout_s()
    if size == 1:
        return Group(name, rank, size, None, wait_s)
    store, address = _emulated_rendezvous.client(size)
    prefix = _prefix(name)
    times = _joins.get(address + prefix, 0) + 1
    bound_s = min(wait_s, LONGEST_JOIN_S) if join_s is None else join_s
    where = f"of group {name!r} at {address}"
    _joining[name] = store.client.given_up = threading.Event()
    try:
        _emulated_rendezvous.meet(store, f"{prefix}/{times}/joined", where, rank, size, bound_s)
        _joins[address + prefix] = times
        prefix += f"/{times}"
        wired = _c10d.PrefixStore(f"{prefix}/wires", store)
        wires = _c10d.ProcessGroupGloo(wired, rank, size, _emulated_rendezvous.gloo_options(address, wait_s))
        # Who has all its wires may leave at once, which would cut those that others are still laying.
        _emulated_rendezvous.meet(store, f"{prefix}/wired", where, rank, size, bound_s)
    finally:
        del _joining[name]
        store.client.given_up = threading.Event()
    return Group(name, rank, size, wires, wait_s, store)


def _start_afresh_in_a_forked_child() -> None:
    """A forked child (a DataLoader worker) holds copies of its parent's sockets, but not the threads that serve them.

    Using the wires there would steal the parent's data, and destroying them would wait for threads that do not exist.
    """
    global _lock
    _lock = threading.RLock()
    _abandoned.append((dict(_groups), _emulated_rendezvous.forget()))
    _groups.clear()
    _joins.clear()
    _joining.clear()


os.register_at_fork(after_in_child=_start_afresh_in_a_forked_child)
