"""Snapshots: copies of the state of a training in the memory of a host, which survive the processes of its instances.

A process per host, `SnapshotMemory`, has two anonymous files. An instance writes the state into the older one, as the
bytes of a broadcast (`tensors.pack_flat`), and then a header that makes it complete: the other one stays valid
meanwhile. The files end with that process, so that nothing is left behind, however it ends.

Does not import torch, unless a snapshot is written as a checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import zlib
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np

from raypod.events import SaveReport
from raypod.plan.plan import Plan
from raypod.plan.sections import SNAPSHOTS_KEPT
from raypod.system.activity_record import anonymous_file, path_of
from raypod.system.process import process_start_ticks
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.resume import record_memory_format
from raypod.training.checkpoint.transfer import Server

_FIELDS = struct.Struct("<qq")  # updates done, bytes of the state
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = 64
_BUFFER_BYTES = 1 << 20  # small tensors are written together


class Place(NamedTuple):
    """Where the snapshots of a host are: a process, and its descriptors of the files."""

    pid: int
    start_ticks: int  # since boot: the pid can be reused
    slots: Tuple[int, ...]


class SnapshotMemory:
    """The owner of the snapshots of a host."""

    def __init__(self) -> None:
        self._files = [anonymous_file("raypod-snapshot") for _ in range(SNAPSHOTS_KEPT)]

    def place(self) -> Place:
        """Return where the snapshots are."""
        pid = os.getpid()
        return Place(pid, process_start_ticks(pid) or 0, tuple(file.fileno() for file in self._files))

    def updates(self) -> List[int]:
        """Return the updates after which the complete snapshots were taken, in no order."""
        found = [_complete(path) for path in _paths(self.place())]
        return [each[0] for each in found if each is not None]

    def has_file(self, path: str) -> bool:
        """Return whether a file exists on this host."""
        return Path(path).exists()

    def save(self, plan: Plan, manifest: Manifest, server: Optional[Server]) -> Tuple[SaveReport, ...]:
        """Write the snapshot after `manifest.update` updates as a checkpoint, on this host or through `server`."""
        from raypod.training.checkpoint import tensors, writer  # they import torch, which this process needs only here

        state = tensors.unpack_flat(read(self.place(), manifest.update))
        fields = {field.name: state[field.name] for field in dataclasses.fields(writer.State)}
        saves = writer.BackgroundWriter(plan)
        if server is not None:
            saves.send_to(server)
        saves.begin(record_memory_format(manifest, state["memory_format"]), writer.State(**fields))
        return saves.finish()

    def close(self) -> None:
        """Drop the snapshots, as the end of the process does."""
        for file in self._files:
            file.close()


def write(place: Place, update: int, buffers: Iterable[np.ndarray]) -> None:
    """Write the state after `update` updates: buffers of uint8 [bytes] to concatenate.

    It takes the place of an earlier one of the same update, else that of the oldest one.

    Raises:
        OSError: the process that has the snapshots has ended, or there is no memory.
    """
    paths = _paths(place)
    ages = [-1 if found is None else found[0] for found in map(_complete, paths)]
    slot = ages.index(update) if update in ages else ages.index(min(ages))
    with paths[slot].open("r+b", buffering=_BUFFER_BYTES) as file:
        file.write(bytes(_HEADER_BYTES))  # incomplete until the end
        file.flush()
        size = sum(file.write(buffer.data) for buffer in buffers)
        file.truncate()
        file.flush()
        file.seek(0)
        fields = _FIELDS.pack(update, size)
        file.write(fields + _CHECKSUM.pack(zlib.crc32(fields)))


def read(place: Place, update: int) -> np.ndarray:
    """Return the state after `update` updates, uint8 [bytes]. FileNotFoundError if there is no such snapshot."""
    for path in _paths(place):
        found = _complete(path)
        if found is not None and found[0] == update:
            return np.fromfile(path, dtype=np.uint8, count=found[1], offset=_HEADER_BYTES)
    raise FileNotFoundError(f"this host has no snapshot of update {update}")


def _paths(place: Place) -> List[Path]:
    """Return the files. FileNotFoundError if their process has ended."""
    if process_start_ticks(place.pid) != place.start_ticks:
        raise FileNotFoundError(f"the process {place.pid}, which has the snapshots of this host, has ended")
    return [path_of(place.pid, descriptor) for descriptor in place.slots]


def _complete(path: Path) -> Optional[Tuple[int, int]]:
    """Return the update and the size in bytes of a complete snapshot."""
    with path.open("rb") as file:
        fields, checksum = file.read(_FIELDS.size), file.read(_CHECKSUM.size)
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.pack(zlib.crc32(fields)) != checksum:
        return None
    update, size = _FIELDS.unpack(fields)
    return update, size
