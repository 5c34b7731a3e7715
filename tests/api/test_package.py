"""`import raypod`: what it exports, and what it does not import."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

import raypod


def test_importing_and_planning_import_neither_torch_nor_ray(run_python: Callable[[str], str]) -> None:
    loaded = "sorted({'torch', 'ray', 'pydantic', 'numpy'} & set(sys.modules))"
    program = f"import sys, raypod; print(raypod.ConfigError.__name__, {loaded}); raypod.stream(device='emulated')"
    program += "; print({'torch', 'ray'} & set(sys.modules))"
    assert run_python(program).split() == ["ConfigError", "[]", "set()"]


def test_training_does_not_import_sympy(run_python: Callable[[str], str], tmp_path: Path) -> None:
    """torch imports it when it first needs it, which takes half a second in each process."""
    flags = f'"--fleet=inline", "--num-instances=1", "--batch-size=120", "--updates=1", "--run-dir={tmp_path}/run"'
    program = "import sys; from raypod.__main__ import main; import torch; before = set(sys.modules)"
    program += f"; code = main(['train', {flags}, '--quiet']); print(code, {{'sympy'}} & (set(sys.modules) - before))"
    assert run_python(program).splitlines()[-1] == "0 set()"


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in raypod.__all__:
        value = getattr(raypod, name)
        assert name in dir(raypod)
        assert name == "STOP" or value.__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'fits'"):
        _ = raypod.fits


def test_errors_are_of_one_tree_and_the_package_is_typed() -> None:
    errors = [value for value in map(raypod.__dict__.get, raypod.__all__) if isinstance(value, type)]
    found = [value for value in errors if issubclass(value, Exception)]
    assert len(found) > 15
    assert all(issubclass(value, raypod.RaypodError) for value in found)
    assert (Path(raypod.__file__).parent / "py.typed").is_file()


def test_a_former_name_is_the_same_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("raypod.datasets")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("raypod.training.data.digits")
    with pytest.deprecated_call(match="^raypod.datasets is now raypod.training.data;") as warned:
        assert importlib.import_module("raypod.datasets.digits") is module
    assert [each.filename for each in warned] == [importlib.__file__]
    assert module.__spec__ is not None
    assert module.__spec__.name == "raypod.training.data.digits"
    assert importlib.util.find_spec("raypod.datasets.no_such_module") is None


def test_the_schedule_in_run_folders_of_lr_range_is_found_under_its_former_name() -> None:
    from raypod.cli import lr_range

    with pytest.warns(DeprecationWarning, match="^raypod.commands is now raypod.cli;"):
        assert importlib.import_module("raypod.commands.lr_range") is lr_range


def test_the_former_path_of_private_py_still_checks(tmp_path: Path, processes: None) -> None:
    program = Path(raypod.__file__).parent / "host" / "private.py"
    for folder, code in ((tmp_path / "new", 0), (Path("/tmp"), 1)):
        assert subprocess.run([sys.executable, str(program), str(folder)], check=False).returncode == code
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
