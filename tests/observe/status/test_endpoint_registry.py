from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from raypod.observe.status import endpoint


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "registry"
    monkeypatch.setenv(endpoint.VARIABLE, str(path))
    return path


def test_an_endpoint_is_listed_while_it_is_served(folder: Path) -> None:
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert path is not None
        assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
        (found,) = endpoint.entries()
        assert (found.run_dir, found.port, found.token) == ("/runs/a", 4711, "secret")
        assert (found.pid, found.uid) == (os.getpid(), os.getuid())
        assert "secret" not in repr(found)
    assert (endpoint.entries(), list(folder.iterdir())) == ([], [])


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_entries_of_other_processes_do_not_count_but_those_of_this_one_in_another_version() -> None:
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert path is not None
        changed(path, added_later=[1])
        assert [each.port for each in endpoint.entries()] == [4711]
        content = path.read_text()
        reused = {"started_ticks": 1}  # the pid belongs to another process now
        for values in (reused, {"pid": 2**22 + 1}, {"pid": None}, {"namespaces": ["pid:[1]", "net:[1]"]}):
            changed(path, **values)
            assert endpoint.entries() == []
            path.write_text(content)


def test_a_new_process_removes_entries_of_killed_ones_but_not_those_of_containers(folder: Path) -> None:
    with endpoint.registered(Path("/runs/a"), 1, "secret") as killed, endpoint.registered(Path("/b"), 2, "s") as other:
        assert killed is not None
        assert other is not None
        changed(killed, started_ticks=1)
        changed(other, started_ticks=1, namespaces=["elsewhere"])
        with endpoint.registered(Path("/runs/c"), 3, "secret"):
            assert not killed.exists()
            assert other.exists()
            assert [each.port for each in endpoint.entries()] == [3]


def test_a_folder_that_others_can_read_gets_no_token(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert path is None
        assert endpoint.entries() == []
    assert list(folder.iterdir()) == []


def test_damaged_entries_are_ignored(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "2-2.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "3-3.json")
    for content in ("", "[]", "{}", "{", json.dumps({"pid": os.getpid()})):
        (folder / "1-1.json").write_text(content)
        assert endpoint.entries() == []


def test_a_folder_named_after_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(endpoint.VARIABLE)
    monkeypatch.setattr(endpoint, "_PARENT", tmp_path)
    with endpoint.registered(Path("/runs/a"), 4711, "secret"):
        assert [each.port for each in endpoint.entries()] == [4711]
        (tmp_path / f"raypod-{os.getuid()}").rename(tmp_path / f"raypod-{os.getuid() + 1}")
        assert endpoint.entries() == []
        (tmp_path / f"raypod-{os.getuid() + 1}").rename(tmp_path / f"raypod-{os.getuid()}")
