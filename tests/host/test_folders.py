from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, List

import pytest

from raypod.host.folders import create_folder, create_numbered_folder, remove_empty


def at_once(action: Callable[[Path], Any], path: Path, times: int = 20) -> List[Any]:
    """Return the results of calls in parallel threads; None for those that raised FileExistsError."""

    def attempt(_: int) -> Any:
        try:
            return action(path)
        except FileExistsError:
            return None

    with ThreadPoolExecutor(times) as pool:
        return list(pool.map(attempt, range(times)))


def test_parallel_calls_create_different_folders(tmp_path: Path) -> None:
    created = at_once(create_numbered_folder, tmp_path / "runs" / "now-digits")
    names = {folders[-1].name for folders in created}
    assert names == {"now-digits", *(f"now-digits-{number}" for number in range(2, 21))}
    assert sum(tmp_path / "runs" in folders for folders in created) == 1  # one call created the parent


def test_one_of_several_parallel_calls_creates_a_folder(tmp_path: Path) -> None:
    created = at_once(create_folder, tmp_path / "a" / "b")
    assert len([folders for folders in created if folders is not None]) == 1


def test_a_parent_that_is_created_before_its_name_is_taken_belongs_to_the_numbered_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, make = tmp_path / "runs", Path.mkdir

    def mkdir_after_another_process(path: Path, *arguments: Any) -> None:
        if path == runs / "now":
            make(path)
        make(path, *arguments)

    monkeypatch.setattr(Path, "mkdir", mkdir_after_another_process)
    assert create_numbered_folder(runs / "now") == [runs, runs / "now-2"]


def test_created_folders_are_removed_unless_they_have_other_files(tmp_path: Path) -> None:
    created = create_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "precious").touch()
    remove_empty(created)
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "precious"]


def test_a_folder_inside_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        create_folder(tmp_path / "file" / "folder")
