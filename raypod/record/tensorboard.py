"""Curves for TensorBoard: its event files, written here because the package that writes them brings twenty others.

A file is a sequence of records (length, masked CRC-32C of it, data, masked CRC-32C of that: tensorflow/core/lib/io/
record_writer.h), each an `Event` message (tensorflow/core/util/event.proto). A run that goes on begins a new file with
a session log at the update it goes on from: TensorBoard drops what an earlier file has from there on.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Dict, List

from raypod.events import EvaluationDone, Event, UpdateDone
from raypod.record.durable import AppendedFile

FOLDER = "tensorboard"
_SESSION_STARTS = 1


class EventFile:
    """The curves of one run from one of its starts on."""

    def __init__(self, run_dir: Path, first_update: int) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir()))
        # Read in the order of their names, which begin with the time.
        self._file = AppendedFile(folder / f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.raypod")
        self._write(0, _bytes_field(3, b"brain.Event:2"))
        self._write(first_update + 1, _bytes_field(7, _varint_field(1, _SESSION_STARTS)))

    def take(self, event: Event) -> None:
        """Add the points of an event, if it has any."""
        if isinstance(event, UpdateDone):
            points = {"loss": event.loss, "accuracy": event.accuracy, "samples_per_s": event.samples_per_s}
            self._add(event.update, {f"training/{name}": value for name, value in points.items()})
        elif isinstance(event, EvaluationDone):
            self._add(event.update, {"test/loss": event.loss, "test/accuracy": event.accuracy})

    def close(self) -> None:
        """Close the file. OSError if points could not be written."""
        self._file.close()

    def _add(self, update: int, points: Dict[str, float]) -> None:
        values = [_bytes_field(1, tag.encode()) + _float_field(2, value) for tag, value in points.items()]
        self._write(update, _bytes_field(5, b"".join(_bytes_field(1, value) for value in values)))

    def _write(self, update: int, content: bytes) -> None:
        data = _double_field(1, time.time()) + _varint_field(2, update) + content
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _double_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _crc_table() -> List[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
