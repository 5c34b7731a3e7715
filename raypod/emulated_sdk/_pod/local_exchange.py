"""Barrier and gather of small rows between the processes of one host over Unix sockets.

They wake the waiting thread itself; Gloo's take 5 to 8 times as long, because its threads wake each other. Polling
before the sleep was slower than sleeping at once on a host without an idle core.

In step s every process exchanges what it has with the process whose rank differs in bit s, so that after log2(size)
steps all have everything. A process that ends, or whose group breaks, closes its sockets: its partners detect it at
once, break their groups, and so inform the others.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import List, Optional

import torch

from _pod import telemetry
from _pod.wires import Group, as_bytes

_MOST_BYTES = 1 << 15  # of a message: it fits into the buffer of a socket, so that all can send before they receive
_HEADER = struct.Struct("<QQ")  # sequence number and length of a message


class LocalExchange:
    """The connections of a process to its partners, in the order of the steps; made by `connect`.

    It must not reference its group, which closes it.
    """

    def __init__(self, partners: List[socket.socket]) -> None:
        self._partners = partners
        self._pollers = []
        self._sequence = 0
        for partner in partners:
            partner.setblocking(False)
            poller = select.poll()
            poller.register(partner, select.POLLIN)
            self._pollers.append(poller)
        weakref.finalize(self, _close_all, partners)

    def barrier(self, group: Group) -> None:
        """Wait until every process of the group has called it.

        Raises:
            PeerFailed: a peer is lost, does not respond in time, or calls something else.
        """
        self._exchange(group, bytearray(), "barrier")

    def fits(self, group: Group, row: torch.Tensor) -> bool:
        """Return whether a row is small enough for `gather`."""
        return row.numel() * row.element_size() * group.size // 2 + _HEADER.size <= _MOST_BYTES

    def gather(self, group: Group, row: torch.Tensor) -> torch.Tensor:
        """Return the contiguous tensors of all processes, [size, *shape]; same shape and dtype in all.

        Raises:
            PeerFailed: as `barrier`.
        """
        length = row.numel() * row.element_size()
        table = bytearray(group.size * length)
        table[group.rank * length : (group.rank + 1) * length] = as_bytes(row).numpy().tobytes()
        self._exchange(group, table, "gather")
        rows = torch.frombuffer(table, dtype=torch.uint8)  # type: ignore[no-untyped-call, unused-ignore]
        return rows.view(row.dtype).view(group.size, *row.shape)

    def close(self) -> None:
        """End the waits of this process and of its partners, from any thread."""
        for partner in self._partners:
            with suppress(OSError):  # the partner has ended
                partner.shutdown(socket.SHUT_RDWR)  # `close` does not end a wait of another thread

    def _exchange(self, group: Group, table: bytearray, doing: str) -> None:
        """Complete a table of which each process holds the row of its rank."""
        group.open_backend()
        began, view, length = time.monotonic(), memoryview(table), len(table) // group.size
        self._sequence += 1
        try:
            with telemetry.waiting(doing):
                for step, (partner, poller) in enumerate(zip(self._partners, self._pollers)):
                    block = group.rank >> step  # of 2 ** step rows
                    held, other = (block << step) * length, ((block ^ 1) << step) * length
                    header = _HEADER.pack(self._sequence, length)
                    partner.sendmsg([header, view[held : held + (length << step)]], [], socket.MSG_NOSIGNAL)
                    size = len(header) + (length << step)
                    arrived = _received(partner, poller, size, began + group.wait_s)
                    if arrived[: len(header)] != header:
                        raise ConnectionError("a process of this host is at another operation")
                    view[other : other + (length << step)] = arrived[len(header) :]
        except OSError as error:
            raise group.fail(doing, error, time.monotonic() - began) from error


def _close_all(partners: List[socket.socket]) -> None:
    for partner in partners:
        partner.close()


def _received(partner: socket.socket, poller: select.poll, length: int, deadline_s: float) -> bytes:
    """Return the next `length` bytes. OSError if the partner closes its connection, or does not send them in time."""
    received = b""
    while len(received) < length:
        if not poller.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
            raise TimeoutError("a process of this host does not respond")
        part = partner.recv(length - len(received))
        if not part:
            raise ConnectionResetError("a process of this host has closed its connection")
        received += part
    return received


def connect(group: Group, path: str) -> Optional[LocalExchange]:
    """Connect the processes of a group, whose size is a power of two, through sockets at `path` + rank.

    The sockets of the file system are removed before it returns. Returns None in all processes if any of them fails.

    Raises:
        PeerFailed: a peer is lost or does not respond in time.
    """
    ranks = [group.rank ^ (1 << bit) for bit in range(group.size.bit_length() - 1)]
    partners: List[socket.socket] = []
    with ExitStack() as stack, ExitStack() as opened:
        listener = _listen(stack, f"{path}.{group.rank}", group)
        # Each process connects to its partners of lower rank, whose sockets listen after this.
        is_possible = all(done for (done,) in group.gather_numbers([int(listener is not None)]))
        if is_possible and listener is not None:
            with suppress(OSError), telemetry.waiting():
                partners = _partners(listener, path, ranks, group)
        for partner in partners:
            opened.callback(partner.close)
        if all(done for (done,) in group.gather_numbers([int(len(partners) == len(ranks))])):
            opened.pop_all()
            exchange = LocalExchange(partners)
            group.closes_with.add(exchange)
            return exchange
    return None


def _listen(stack: ExitStack, address: str, group: Group) -> Optional[socket.socket]:
    """Return a listening socket that only this user can connect to; None if it cannot be created."""
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address)
        stack.callback(Path(address).unlink)
        os.chmod(address, 0o600)  # noqa: PTH101 - before it listens
        listener.listen(group.size)
    except OSError:
        return None
    listener.settimeout(group.wait_s)
    return listener


def _partners(listener: socket.socket, path: str, ranks: List[int], group: Group) -> List[socket.socket]:
    """Return a connection to each of `ranks`, in their order. OSError if one does not connect in time."""
    found = {}
    with ExitStack() as opened:
        for rank in ranks:
            if rank < group.rank:
                found[rank] = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                found[rank].settimeout(group.wait_s)
                found[rank].connect(f"{path}.{rank}")
                found[rank].sendall(group.rank.to_bytes(4, "big"))
        while len(found) < len(ranks):
            partner = opened.enter_context(listener.accept()[0])
            partner.settimeout(group.wait_s)
            found[int.from_bytes(partner.recv(4, socket.MSG_WAITALL), "big")] = partner
        opened.pop_all()
    return [found[rank] for rank in ranks]
