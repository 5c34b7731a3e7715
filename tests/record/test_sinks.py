"""The curves: as TensorBoard's own reader sees them, and without what a resumed run did again."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Dict, List, Tuple

import pytest

from raypod import train
from raypod.events import EvaluationDone, UpdateDone
from raypod.record import sinks
from raypod.record.sinks import EventFile, _masked_crc


def files_in(folder: Path) -> List[Path]:
    return sorted((folder / sinks.FOLDER).iterdir())


def records(path: Path) -> List[bytes]:
    """The records of a file, their checksums compared."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        assert content[8:12] == _masked_crc(content[:8])
        found.append(content[12 : 12 + length])
        assert content[12 + length : 16 + length] == _masked_crc(found[-1])
        content = content[16 + length :]
    return found


def test_the_checksum_is_castagnolis() -> None:
    # RFC 3720, B.4: 32 bytes of zeros have the CRC-32C 0x8a9136aa.
    crc = 0x8A9136AA
    assert _masked_crc(b"\0" * 32) == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_a_file_begins_with_its_version_and_where_it_goes_on(tmp_path: Path) -> None:
    curves = EventFile(tmp_path, 300)
    curves.take(UpdateDone(301, 7, 0.5, 75.0, 9632, 1000.0, 2.0))
    curves.take(EvaluationDone(360, 0.25, 99.0, 301, 7))
    curves.close()
    version, session, update, evaluation = records(files_in(tmp_path)[0])
    assert version.endswith(b"brain.Event:2")
    step = b"\x10\xad\x02"  # field 2, a varint: 301
    assert session[9:] == step + b"\x3a\x02\x08\x01"
    assert update[9:12] == step
    assert b"\x0a\x0dtraining/loss\x15" + struct.pack("<f", 0.5) in update
    assert b"\x0a\x0dtest/accuracy\x15" + struct.pack("<f", 99.0) in evaluation


def curves_of(folder: Path) -> Dict[str, List[Tuple[int, float]]]:
    package = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(package, reason="tensorboard is not installed").EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_shows_each_update_once_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ["--fleet", "inline", "--device", "emulated", "--lr-schedule", "constant", "--run-dir", str(folder)]
    flags += ["--checkpoint-every", "2 updates", "--tensorboard", "--model", "tiny"]
    assert train.main([*flags, "--updates", "3"]) == 0
    earlier = folder / "checkpoints" / "update-00000002"
    assert train.main([*flags, "--updates", "6", "--resume", str(earlier)]) == 0
    assert [len(records(path)) for path in files_in(folder)] == [2 + 3 + 1, 2 + 4 + 1]
    curves = curves_of(folder / sinks.FOLDER)
    assert [step for step, _ in curves["training/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in curves["test/accuracy"]] == [6]
