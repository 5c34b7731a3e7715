"""MLflow and W&B record a run and its resumption into local files, without duplicates."""

from __future__ import annotations

import importlib
import sqlite3
import struct
from pathlib import Path
from typing import Any, Iterator, List

import pytest
import torch

import raypod
from raypod.events import UpdateDone
from raypod.observe.trackers import companions
from raypod.system.companion import read_state

FLAGS = {"fleet": "inline", "device": "emulated", "model": "tiny", "replicas": 2, "lr_schedule": "constant"}


def log_media(event: Any) -> None:
    if isinstance(event, UpdateDone) and event.update % 2 == 0:
        raypod.log_image("samples/ä", torch.rand(3, 8, 8))
        raypod.log_text("../note", f"<b>update {event.update}")


def run_twice(tmp_path: Path, tracker: str) -> Path:
    """Run 6 updates, and resume after update 3 until update 8; return the run folder."""
    run = tmp_path / "run"
    flags = {**FLAGS, "tracker": tracker, "tracker_timeout_s": 120, "run_dir": run, "checkpoint_every": "3 updates"}
    raypod.fit(**flags, updates=6, callbacks=log_media)
    raypod.fit(**flags, updates=8, callbacks=log_media, resume=str(run / "checkpoints" / "update-00000003"))
    assert read_state(companions.path_of(run, tracker), companions.TrackerRecord()).is_complete
    return run


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra raypod[mlflow] is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra raypod[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run_twice(tmp_path, "mlflow")
    database = sqlite3.connect(str(tmp_path / "mlflow.db"))
    try:
        ((run_id, status),) = database.execute("SELECT run_uuid, status FROM runs").fetchall()
        query = "SELECT step, key FROM metrics WHERE run_uuid = ? ORDER BY step"
        rows = database.execute(query, (run_id,)).fetchall()
        params = dict(database.execute("SELECT key, value FROM params").fetchall())
    finally:
        database.close()
    assert status == "FINISHED"
    assert [step for step, key in rows if key == "training/loss"] == list(range(1, 9))
    assert [step for step, key in rows if key == "test/accuracy"] == [6, 8]
    assert params["training.model"] == "tiny"
    (report,) = tmp_path.rglob("artifacts/report.html")
    texts = {file.name: file.read_text() for file in (report.parent / "texts" / "note").iterdir()}
    assert texts == {f"{update:08d}.txt": f"<b>update {update}" for update in (2, 4, 6, 8)}
    assert len(list(report.parent.glob("images/*.png"))) == 4


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra raypod[wandb] is not installed")
    key = "0123456789abcdef" * 2 + "01234567"
    for name, value in {"MODE": "offline", "API_KEY": key, "CACHE_DIR": "cache", "DATA_DIR": "data"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / value) if name.endswith("DIR") else value)
    run = run_twice(tmp_path, "wandb")
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    run_id = read_state(companions.path_of(run, "wandb"), companions.TrackerRecord()).run_id
    assert {file.stem for file in files} == {f"run-{run_id}"}
    assert [step for file in files for step in steps_in(file)] == list(range(1, 9))
    assert len(list(run.glob("wandb/offline-run-*/files/media/images/samples/*.png"))) == 4
    (text,) = run.glob("wandb/offline-run-*/files/media/html/**/note_8_*.html")
    assert "<pre>&lt;b&gt;update 8</pre>" in text.read_text()
    assert not [file for file in run.rglob("*") if file.is_file() and key.encode() in file.read_bytes()]


def steps_in(file: Path) -> List[int]:
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    steps = []
    for content in records_in(file.read_bytes()):
        record = records.Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    return steps


def records_in(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB, the format of W&B's files, whose header has 7 bytes."""
    block, position, record = 32_768, 7, b""
    while position < len(data):
        left = block - position % block
        if left >= 7:
            _, length, kind = struct.unpack_from("<IHB", data, position)
            record += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # a whole record, or the last part of one
                yield record
                record = b""
        else:
            position += left
