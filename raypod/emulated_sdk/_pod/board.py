"""A board: shared memory in which the processes of one host reduce gradients, instead of over loopback sockets.

A board has one row per process and one for the result; each process owns one slice of the row. In a call, process p
- copies its contribution into its row, except for its own slice, which no other process reads;       then a barrier;
- finishes the tree on its slice from the other rows and its own tensors, into the result row;        then a barrier.
All processes read the result in place. Two barriers per call and one board are enough: the result is overwritten only
after the next call's first barrier, when all processes have used it, and the rows are last read before the second
barrier. The additions are in tree order, so that the result has the same bits as over the network.

The file is unlinked as soon as all processes have mapped it, so no file remains in /dev/shm if a process is killed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

import torch

from _pod.local_exchange import LocalExchange, connect
from _pod.reduce import even_slices
from _pod.wires import Group

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
        step = 1
        while 2 * step < len(parts):
            for left in range(0, len(parts), 2 * step):
                parts[left].add_(parts[left + step])
            step *= 2
        torch.add(parts[0], parts[step], out=self.result[place])


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
        exchange = connect(group, shared_path) if is_mapped else None
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
