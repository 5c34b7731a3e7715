"""Modules of the user that cannot be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypod.errors import ConfigError
from raypod.plan import user_code


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("houses_of.py:load", "k = 'houses_of.py:load': No module named .*; omit .py: houses_of:load$"),
        ("no_houses.py:load", "No module named 'no_houses'; omit .py: no_houses:load$"),
        (
            "no_houses:load",
            r"No module named 'no_houses' in the current folder \({}\), in PYTHONPATH or among the inst",
        ),
        ("own_houses:load", "k = 'own_houses:load': No module named 'no_such_package'$"),
    ],
)
def test_a_module_that_is_not_found_has_a_way_out(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "houses_of.py").write_text("")
    (tmp_path / "own_houses.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words.format(tmp_path)):
        user_code.import_name(name, "k")
