"""A run whose run folder no longer takes its state saves the newest one at another place before it ends."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any, ContextManager, List, Tuple

import pytest

import raypod
from raypod.api import training
from raypod.errors import CheckpointNotSaved, FolderLost, RunError
from raypod.events import UpdateDone
from raypod.runs import run_state, verify_data
from raypod.runs.upload.mirror import Mirror
from raypod.runtime.coordinator import kept_state
from raypod.system.companion import Companion
from raypod.training.checkpoint import storage

URL = "file:///store"
RUN = {
    "fleet": "inline",
    "device": "emulated",
    "model": "tiny",
    "replicas": 2,
    "batch_size": 4,
    "progress": False,
    "lr_schedule": "constant",
    "checkpoint_every": "2 updates",
    "save_retry_s": 0,
    "max_unsaved": "1 checkpoint",
}


@pytest.fixture
def rescued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage: a mirror renames the folder that it gets to this one."""
    store = tmp_path / "store"

    class DirectMirror(Mirror):
        def _finish(self) -> bool:
            self._process.folder.rename(store)
            return True

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(kept_state, "_OTHER_DISKS", ())
    monkeypatch.setattr(Companion, "start", lambda mirror: None)
    monkeypatch.setattr(training, "Mirror", DirectMirror)
    return store


def ended_by(kind: type, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Tuple[RunError, List[int]]:
    """Train until the run folder is `lost` or its disk full after 4 updates; return the error and all updates."""
    new_checkpoint, updates = storage.new_checkpoint, []

    def on_event(event: Any) -> None:
        if isinstance(event, UpdateDone):
            updates.append(event.update)
        if isinstance(event, UpdateDone) and event.update == 4:
            if kind is FolderLost:
                folder.rename(folder.with_name("moved"))
            else:
                monkeypatch.setattr(storage, "new_checkpoint", full_disk)

    def full_disk(checkpoints: Path, update: int) -> ContextManager[Path]:
        if folder in checkpoints.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return new_checkpoint(checkpoints, update)

    with pytest.raises(kind) as caught:
        raypod.fit(run_dir=folder, updates=20, callbacks=on_event, **{**RUN, **flags})
    return caught.value, updates


@pytest.mark.parametrize("kind", [FolderLost, CheckpointNotSaved])
def test_the_newest_state_is_saved_on_the_storage(
    kind: type, rescued: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, updates = ended_by(kind, tmp_path / "run", monkeypatch, storage_path=URL)
    newest = updates[-1]
    assert f"the state of update {newest} is saved: continue on another disk with --resume {URL}/run" in str(error)
    assert storage.latest_name(rescued) == f"update-{newest:08d}"
    assert run_state.is_unfinished(rescued)
    assert not list((tmp_path / "tmp").iterdir())
    assert kind is not FolderLost or not (tmp_path / "run").exists()
    result = raypod.fit(resume=rescued, updates=20, **{**RUN, "storage_path": None})
    undisturbed = raypod.fit(run_dir=tmp_path / "undisturbed", updates=20, **RUN)
    assert result.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert verify_data.verify(rescued).is_proved
