"""Where the user's code raised an exception, and modules that cannot be found."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest

from raypod.errors import ConfigError, DataMissing
from raypod.plan import user_code

MODULE = """import json
def parse(text):
    return json.loads(text)
def outer(text):
    return parse(text)
"""


def functions(file: str) -> Dict[str, Any]:
    """The functions of a user's module, which call the standard library."""
    found: Dict[str, Any] = {}
    exec(compile(MODULE, file, "exec"), found)
    return found


@pytest.fixture
def outer(tmp_path: Path) -> Callable[[str], Any]:
    return functions(str(tmp_path / "houses.py"))["outer"]


def raised_by(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - returned
        function()
    return raised.value


def test_the_place_is_the_innermost_frame_of_the_users_code(outer: Any) -> None:
    assert user_code.place_of(raised_by(lambda: outer("{"))) == " (houses.py:3, in parse)"
    of_script = functions("<dynamic-code>")  # as cloudpickle names it
    assert user_code.place_of(raised_by(lambda: of_script["parse"]("{"))) == " (line 3, in parse)"
    of_numpy = raised_by(lambda: np.zeros((2, 3)).reshape(4))
    of_numpy.__traceback__ = None
    assert user_code.place_of(of_numpy) == ""


def test_an_error_in_another_file_names_the_function_that_raypod_called(outer: Any, tmp_path: Path) -> None:
    own: Dict[str, Any] = {"parse": outer}
    exec(compile("def datasets():\n\n    return parse('{')\n", str(tmp_path / "mine.py"), "exec"), own)
    error = raised_by(lambda: user_code.invoke(own["datasets"], "mine:datasets", "task.name"))
    assert user_code.place_of(error) == " (mine.py:3, in datasets; houses.py:3, in parse)"


def test_the_place_survives_pickling_and_loader_workers(outer: Any) -> None:
    error = raised_by(lambda: outer(None))
    user_code.record_place(error)
    arrived = pickle.loads(pickle.dumps(error))
    assert arrived.__traceback__ is None
    assert user_code.place_of(arrived) == " (houses.py:3, in parse)"
    error = raised_by(lambda: outer("{"))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    of_worker = ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {text}")
    assert user_code.place_of(of_worker) == " (houses.py:3, in parse)"


def test_an_error_of_the_users_code_is_one_line_with_a_remark(outer: Any) -> None:
    expected = r"^houses:outer: TypeError: .*; houses.py:3, in parse\); called with None$"
    with pytest.raises(ConfigError, match=expected), user_code.reported("houses:outer", "; called with None"):
        outer(None)
    with pytest.raises(DataMissing, match="^no file$"), user_code.reported("houses:outer", "; called with None"):
        raise DataMissing("no file")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("houses_of.py:load", "k = 'houses_of.py:load': No module named .*; omit .py: houses_of:load$"),
        ("no_houses.py:load", "No module named 'no_houses'; omit .py: no_houses:load$"),
        ("no_houses:load", r"No module named 'no_houses' in the current folder \({}\), in PYTHONPATH or among th"),
        ("own_houses:load", "k = 'own_houses:load': No module named 'no_such_package'$"),
    ],
)
def test_a_module_that_is_not_found_has_a_way_out(name: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "houses_of.py").write_text("")
    (tmp_path / "own_houses.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words.format(tmp_path)):
        user_code.import_name(name, "k")
