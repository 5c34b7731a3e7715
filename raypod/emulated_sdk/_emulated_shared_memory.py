"""A board in shared memory on which processes of one host combine gradients: stands in, like the wires, for GCL on a
pod (contract section 1.5). It only saves the way through the loopback sockets; who uses it sees the same bits.

A board has one row per process and one for the result; the length of a row is cut into one slice per process. In a
call, process p
- writes its contribution into its row, but for its own slice, which nobody else needs;              then a barrier;
- finishes the tree on its slice out of the others' rows and its own tensors, into the result's row; then a barrier.
Everyone reads the result where it lies: nothing is copied back. Two barriers a call suffice, and one board: a result is
overwritten only after the next call's first barrier, by when everyone has used it, and the rest of a row was last
touched before the second barrier.

The file loses its name as soon as all have mapped it, so that nothing is left in /dev/shm, however the processes end.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

import _emulated_pod
import torch
from _emulated_pod import Group

_FOLDER = "/dev/shm"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Free bytes asked for per byte needed: others use that memory too.
_MARGIN = 1.5
# Slices begin on a cache line for every dtype of at least 4 bytes, as tensors do.
_ALIGNMENT = 16
_LONGEST_PATH = 128


class Piece(NamedTuple):
    """A part of a tensor that one process finishes."""

    tensor: int  # its place in the list of tensors
    part: slice  # of the tensor's elements, as they lie in memory
    place: slice  # in a row


class Board:
    """Mapped by all processes of a group; made by `open_board`. It must not refer to its group, whose end ends it.

    starts, lengths: where in a row each tensor begins, and its elements.
    """

    def __init__(
        self, memory: torch.Tensor, rank: int, size: int, starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._rank = rank
        *self._rows, self.result = memory.view(size + 1, -1)
        slices = aligned_slices(starts[-1] + lengths[-1], size)
        self._pieces = [_pieces(owned, starts, lengths) for owned in slices]

    def sum_(self, group: Group, own: Sequence[torch.Tensor]) -> None:
        """Leaves the sum over all processes in `result`, added in tree order, until the next call.

        own: this process's tensors, flat; scratch afterwards. RuntimeError if a peer is lost or silent.
        """
        row = self._rows[self._rank]
        for peer in group.peers:
            for tensor, part, place in self._pieces[peer]:
                row[place].copy_(own[tensor][part])
        group.barrier()
        for tensor, part, place in self._pieces[self._rank]:
            self._finish_tree(own[tensor][part], place)
        group.barrier()

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
    """The parts of the tensors that lie within `owned`."""
    pieces = []
    for tensor, (start, length) in enumerate(zip(starts, lengths)):
        low, high = max(owned.start, start), min(owned.stop, start + length)
        if low < high:
            pieces.append(Piece(tensor, slice(low - start, high - start), slice(low, high)))
    return pieces


def aligned_slices(length: int, pieces: int) -> List[slice]:
    """Cuts 0..length-1 into nearly equal slices that begin at multiples of 16; of short lengths some are empty."""
    lines = _emulated_pod.cut(0, -(-length // _ALIGNMENT), pieces)
    return [slice(min(line.start * _ALIGNMENT, length), min(line.stop * _ALIGNMENT, length)) for line in lines]


def offer(size: int, length: int, dtype: torch.dtype) -> List[int]:
    """What this process brings to the agreement on a board: [where it runs and with which dtype, 1 if it has room].

    The kernel's boot names the host, and the device number of /dev/shm the mount: containers may each have their own.
    """
    try:
        boot, folder = Path(_BOOT_ID).read_text(), Path(_FOLDER).stat()
        fits = length > 0 and _free_bytes() > _MARGIN * _bytes_needed(size, length, dtype)
    except OSError:
        return [0, 0]
    place = f"{boot} {folder.st_dev} {folder.st_ino} {dtype}"
    return [int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big"), int(fits)]


def is_wanted(offers: Sequence[Sequence[int]]) -> bool:
    """Whether all processes are in one place and have room."""
    return len({place for place, _ in offers}) == 1 and all(fits for _, fits in offers)


def open_board(group: Group, starts: Sequence[int], lengths: Sequence[int], dtype: torch.dtype) -> Optional[Board]:
    """Makes and maps a board in all processes of a group, whose size is a power of two above one.

    None in all of them if one cannot: they use the wires. RuntimeError if a peer is lost or silent.
    """
    needed = _bytes_needed(group.size, starts[-1] + lengths[-1], dtype)
    path = _create(needed) if group.rank == 0 else ""
    try:
        path_of_all = _tell(group, path)
        memory = _map(path_of_all, needed, dtype) if path_of_all else None
        # Nobody goes on before all have mapped it, or tried to.
        have_all = all(mapped for (mapped,) in group.gather_numbers([int(memory is not None)]))
    finally:
        if path:
            Path(path).unlink()
    return Board(memory, group.rank, group.size, starts, lengths) if memory is not None and have_all else None


def _free_bytes() -> int:
    figures = os.statvfs(_FOLDER)
    return figures.f_bavail * figures.f_frsize


def _bytes_needed(size: int, length: int, dtype: torch.dtype) -> int:
    """Of one board, whose rows begin on pages."""
    row = length * torch.empty(0, dtype=dtype).element_size()
    return (size + 1) * -(-row // mmap.PAGESIZE) * mmap.PAGESIZE


def _create(needed: int) -> str:
    """Makes the file, which only this user may open, and returns its path; "" if the memory is not to be had.

    Its memory is taken now: a process that touched a page for which there is none would be killed by SIGBUS.
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


def _tell(group: Group, path: str) -> str:
    """Rank 0's path, in every process."""
    letters = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
    text = path.encode()
    letters[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    group.broadcast_(letters, 0)
    return bytes(letters.tolist()).rstrip(b"\0").decode()


def _map(path: str, needed: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
    """The file's memory as one flat tensor; None if it is not the file meant or cannot be opened here."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            memory = mmap.mmap(descriptor, needed)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: it is shorter
        return None
    return torch.frombuffer(memory, dtype=dtype)  # type: ignore[no-untyped-call, unused-ignore]
