"""A board: shared memory in which the processes of one host reduce gradients, instead of over loopback sockets.

A board has one row per process and one for the result; each process owns one slice of the row. In a call, process p
- copies its contribution into its row, except for its own slice, which no other process reads;       then a barrier;
- finishes the tree on its slice from the other rows and its own tensors, into the result row;        then a barrier.
All processes read the result in place. Two barriers per call and one board are enough: the result is overwritten only
after the next call's first barrier, when all processes have used it, and the rows are last read before the second
barrier. The additions are in tree order, so that the result has the same bits as over the network.

The file is unlinked as soon as all processes have mapped it, so no file remains in /dev/shm if a process is killed.

Barriers, and gathers of small rows, go over Unix sockets (`LocalExchange`). They wake the waiting thread itself; Gloo's
take 5 to 8 times as long, because its threads wake each other. Polling before the sleep was slower than sleeping at
once on a host without an idle core.

In step s every process exchanges what it has with the process whose rank differs in bit s, so that after log2(size)
steps all have everything. A process that ends, or whose group breaks, closes its sockets: its partners detect it at
once, break their groups, and so inform the others.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import struct
import tempfile
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

import torch

from _pod import telemetry
from _pod.reduce import additions_within, even_slices
from _pod.wires import Group, as_bytes

_FOLDER = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MARGIN = 1.5  # free bytes required per byte needed: other programs use that memory too
_ALIGNMENT = 16  # elements: slices begin on a cache line for every dtype of at least 4 bytes, as tensors do
_MAX_PATH = 128


class Piece(NamedTuple):
    """The part of a tensor that lies in one process's slice."""

    tensor: int  # index in the list of tensors
    part: slice  # of the tensor's elements, in memory order
    place: slice  # in a row


class Board:
    """Shared memory mapped by all processes of a group; made by `open_board`. It must not reference its group.

    Args:
        starts, lengths: where each tensor begins in a row, and its number of elements.
        exchange: between the processes; without it, barriers are those of the group.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        rank: int,
        size: int,
        starts: Sequence[int],
        lengths: Sequence[int],
        exchange: Optional[LocalExchange] = None,
    ) -> None:
        self._rank, self._exchange = rank, exchange
        *self._rows, self.result = memory.view(size + 1, -1)
        slices = aligned_slices(starts[-1] + lengths[-1], size)
        self._pieces = [_pieces(owned, starts, lengths) for owned in slices]

    def sum_(self, group: Group, own: Sequence[torch.Tensor]) -> None:
        """Write the sum over all processes, added in tree order, to `result`, where it is valid until the next call.

        Args:
            own: this process's tensors, flat; scratch afterwards.

        Raises:
            PeerFailed: a peer is lost or does not respond in time.
        """
        row = self._rows[self._rank]
        for peer in group.peers:
            for tensor, part, place in self._pieces[peer]:
                row[place].copy_(own[tensor][part])
        self._wait(group)
        for tensor, part, place in self._pieces[self._rank]:
            self._finish_tree(own[tensor][part], place)
        self._wait(group)

    def gather(self, group: Group, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, as `Group.gather`."""
        if self._exchange is None or not self._exchange.fits(group, row):
            return group.gather(row)
        return self._exchange.gather(group, row.contiguous())

    def _wait(self, group: Group) -> None:
        if self._exchange is None:
            group.barrier()
        else:
            self._exchange.barrier(group)

    def _finish_tree(self, own: torch.Tensor, place: slice) -> None:
        parts = [row[place] for row in self._rows]
        parts[self._rank] = own
        *additions, (left, right) = additions_within(len(parts), 0, len(parts))
        for target, source in additions:
            parts[target].add_(parts[source])
        torch.add(parts[left], parts[right], out=self.result[place])


def _pieces(owned: slice, starts: Sequence[int], lengths: Sequence[int]) -> List[Piece]:
    pieces = []
    for tensor, (start, length) in enumerate(zip(starts, lengths)):
        low, high = max(owned.start, start), min(owned.stop, start + length)
        if low < high:
            pieces.append(Piece(tensor, slice(low - start, high - start), slice(low, high)))
    return pieces


def aligned_slices(length: int, count: int) -> List[slice]:
    """Cut 0..length-1 into nearly equal slices that begin at multiples of 16; some may be empty."""
    lines = even_slices(0, -(-length // _ALIGNMENT), count)
    return [slice(min(line.start * _ALIGNMENT, length), min(line.stop * _ALIGNMENT, length)) for line in lines]


def capability(size: int, length: int, dtype: torch.dtype) -> List[int]:
    """Return [hash of host, /dev/shm and dtype; 1 if the memory is sufficient], for `is_possible`; [0, 0] without shm.

    The boot id identifies the host, and device and inode of /dev/shm the mount: containers may each have their own.
    """
    try:
        boot, folder = Path(_BOOT_ID).read_text(), Path(_FOLDER).stat()
        fits = length > 0 and _free_bytes() > _MARGIN * _bytes_needed(size, length, dtype)
    except OSError:
        return [0, 0]
    identity = f"{boot} {folder.st_dev} {folder.st_ino} {dtype}"
    return [int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "big"), int(fits)]


def is_possible(capabilities: Sequence[Sequence[int]]) -> bool:
    """Return whether all processes share one /dev/shm with enough memory."""
    return len({identity for identity, _ in capabilities}) == 1 and all(fits for _, fits in capabilities)


def open_board(group: Group, starts: Sequence[int], lengths: Sequence[int], dtype: torch.dtype) -> Optional[Board]:
    """Create and map a board in all processes of a group, whose size is a power of two above one.

    Returns None in all processes if any of them fails to map it.

    Raises:
        PeerFailed: a peer is lost or does not respond in time.
    """
    needed = _bytes_needed(group.size, starts[-1] + lengths[-1], dtype)
    path = _create(needed) if group.rank == 0 else ""
    try:
        shared_path = _broadcast_path(group, path)
        memory = _map(shared_path, needed, dtype) if shared_path else None
        # The file keeps its name until all have tried to map it.
        is_mapped = all(mapped for (mapped,) in group.gather_numbers([int(memory is not None)]))
        exchange = connect_locally(group, shared_path) if is_mapped else None
    finally:
        if path:
            Path(path).unlink()
    if memory is None or not is_mapped:
        return None
    return Board(memory, group.rank, group.size, starts, lengths, exchange)


def _free_bytes() -> int:
    figures = os.statvfs(_FOLDER)
    return figures.f_bavail * figures.f_frsize


def _bytes_needed(size: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of one board, whose rows begin on pages."""
    row = length * torch.empty(0, dtype=dtype).element_size()
    return (size + 1) * -(-row // mmap.PAGESIZE) * mmap.PAGESIZE


def _create(needed: int) -> str:
    """Create the file, accessible to this user only, and return its path; "" if there is not enough memory.

    The memory is allocated now: a process that touches a page that cannot be allocated is killed by SIGBUS.
    """
    try:
        descriptor, path = tempfile.mkstemp(prefix="emulated_pod_", dir=_FOLDER)
    except OSError:
        return ""
    try:
        os.posix_fallocate(descriptor, 0, needed)
    except OSError:
        Path(path).unlink()
        return ""
    finally:
        os.close(descriptor)
    return path


def _broadcast_path(group: Group, path: str) -> str:
    """Return rank 0's path in every process."""
    letters = torch.zeros(_MAX_PATH, dtype=torch.uint8)
    text = path.encode()
    letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    group.broadcast_(letters, 0)
    return bytes(letters.tolist()).rstrip(b"\0").decode()


def _map(path: str, needed: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """Return the file's memory as one flat tensor; None if it cannot be opened here or is too short."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            memory = mmap.mmap(descriptor, needed)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: the file is too short
        return None
    return torch.frombuffer(memory, dtype=dtype)  # type: ignore[no-untyped-call, unused-ignore]


_MOST_BYTES = 1 << 15  # of a message: it fits into the buffer of a socket, so that all can send before they receive
_HEADER = struct.Struct("<QQ")  # sequence number and length of a message


class LocalExchange:
    """The connections of a process to its partners, in the order of the steps; made by `connect_locally`.

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


def connect_locally(group: Group, path: str) -> Optional[LocalExchange]:
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
