"""The default folder of executables, and the stale lock files that PopTorch leaves there."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from raypod.runtime.worker import devices
from raypod.system.sdk import Sdk
from raypod.training.models import program

NAME = "0" * 32 + ".lock"


@pytest.mark.parametrize(
    ("device", "pod", "inherited", "expected"),
    [
        ("ipu", {}, None, "{folder}/raypod/executables/{host}"),
        ("ipu", {}, "/inherited", "/inherited"),
        ("ipu", {"executable_cache_path": "/chosen"}, "/inherited", "/chosen"),
        ("emulated", {"executable_cache_path": "/chosen"}, None, "/chosen"),
        ("emulated", {}, None, None),
    ],
)
def test_the_folder_is_of_this_user_and_host_unless_another_one_is_chosen(
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    pod: Dict[str, str],
    inherited: Optional[str],
    expected: Optional[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)
    if inherited:
        monkeypatch.setenv("POPTORCH_CACHE_DIR", inherited)
    plan = make(pod=pod)
    folder = devices.executable_folder(plan, Sdk(device, ""))
    assert folder == (expected and expected.format(folder=tmp_path, host=socket.gethostname()))
    assert Path(tmp_path, "raypod").exists() is (folder is not None and folder.startswith(str(tmp_path)))
    for options in (program.training_options(plan, folder), program.inference_options(plan, folder)):
        assert options._Popart.options.get("cachePath", "") == (folder or inherited or "")


def test_a_folder_that_cannot_be_created_is_a_warning(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raypod").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)
    with pytest.warns(UserWarning, match=r"Not a directory\); choose a folder with --executable-cache-path"):
        assert devices.executable_folder(make(), Sdk("ipu", "")) is None


def compiles(folder: Path, processes: int) -> bool:
    """Return whether a process compiles by PopTorch's lock, which counts the processes of all hosts."""
    path = folder / NAME
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("0")
        file.flush()
        position = path.stat().st_size
    if position == processes:
        path.unlink()
    return position == 1


def test_one_process_of_a_host_compiles_at_each_start(tmp_path: Path) -> None:
    for _ in range(3):
        for _ in range(2):  # the instances of this host
            devices.remove_stale_locks(str(tmp_path))
        assert [compiles(tmp_path, processes=4) for _ in range(2)] == [True, False]
    with (tmp_path / NAME).open() as file:  # another run compiles
        fcntl.flock(file, fcntl.LOCK_EX)
        devices.remove_stale_locks(str(tmp_path))
        assert (tmp_path / NAME).exists()
    (tmp_path / "poetry.lock").touch()  # of another program, in a folder that is not for executables alone
    devices.remove_stale_locks(str(tmp_path))
    assert [path.name for path in tmp_path.glob("*.lock")] == ["poetry.lock"]
    devices.remove_stale_locks(None)
