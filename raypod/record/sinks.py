"""The files of a run folder that grow with its events: metrics, evaluations, ledger, and curves for TensorBoard."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Dict, List, Optional

from raypod.errors import RunError
from raypod.events import CallDone, CheckpointBegun, EvaluationDone, Event, Repaired, RunStarted, UpdateDone
from raypod.host.files import AppendedFile
from raypod.plan.plan import Plan
from raypod.record.ledger import Ledger
from raypod.record.metrics import JsonLines
from raypod.record.run_folder import EVALUATIONS, METRICS


class Sinks:
    """Takes the events of a run. They are opened by its start: a run that could not start leaves its folder free."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._metrics: Optional[JsonLines] = None
        self._evaluations: Optional[JsonLines] = None
        self._ledger: Optional[Ledger] = None
        self._curves: Optional[EventFile] = None

    def take(self, event: Event) -> None:
        """Write what belongs to an event."""
        if self._curves is not None:
            self._curves.take(event)
        if isinstance(event, RunStarted):
            self._open(event)
        elif isinstance(event, Repaired) and self._ledger is not None:
            self._ledger.begin(event.generation, event.update)
        elif isinstance(event, UpdateDone) and self._metrics is not None:
            self._metrics.write(event)
        elif isinstance(event, EvaluationDone) and self._evaluations is not None:
            self._evaluations.write(event)
        elif isinstance(event, CallDone) and self._ledger is not None:
            self._ledger.write(event)
        elif isinstance(event, CheckpointBegun):
            self._sync()

    def _open(self, event: RunStarted) -> None:
        folder = Path(self._plan.run_dir)
        self._metrics = JsonLines(folder / METRICS, event.first_update)
        self._evaluations = JsonLines(folder / EVALUATIONS, event.first_update)
        self._ledger = Ledger(self._plan)
        self._ledger.begin(event.generation, event.first_update)
        if self._plan.config.run.tensorboard:
            self._curves = EventFile(folder, event.first_update)

    def _sync(self) -> None:
        """Whoever goes on from a checkpoint finds every line before it, also after a power loss."""
        for sink in (self._metrics, self._evaluations, self._ledger):
            if sink is not None:
                sink.sync()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        """Close the files. RunError if lines could not be written (the disk is still full) and nothing else failed."""
        failed = []
        for sink in (self._metrics, self._evaluations, self._ledger, self._curves):
            try:
                if sink is not None:
                    sink.close()
            except OSError as error:
                failed.append(error.strerror or str(error))
        self._metrics = self._evaluations = self._ledger = self._curves = None
        if failed and kind is None:
            raise RunError(f"cannot write the last lines of metrics and ledger in {self._plan.run_dir}: {failed[0]}")


# --- from record.tensorboard: Curves for TensorBoard: its event files, written here because the package that writes them brings twenty others.
#
# A file is a sequence of records (length, masked CRC-32C of it, data, masked CRC-32C of that: tensorflow/core/lib/io/
# record_writer.h), each an `Event` message (tensorflow/core/util/event.proto). A run that goes on begins a new file with
# a session log at the update it goes on from: TensorBoard drops what an earlier file has from there on.
#

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
