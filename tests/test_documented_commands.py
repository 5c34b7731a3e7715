"""The commands of the pages training.md and language-models.md, without Ray, and with few updates and little text."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from documented import DOCS, commands, modules

from raypod.__main__ import main

FEW = ["--fleet", "inline", "--num-instances", "1", "--updates", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(DOCS.parent / "configs")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("page", "count"), [("reference/training.md", 6), ("how-to/language-models.md", 3)])
def test_every_command_of_the_page(page: str, count: int) -> None:
    for name, code in modules(page).items():
        Path(name).write_text(code)
    text = ["--max-mb", "0.1"] if page == "how-to/language-models.md" else []
    found = commands(page)
    assert len(found) == count
    for line in found:
        words = shlex.split(line)
        assert words[0] == "raypod"
        assert main([*words[1:], *(FEW if words[1] == "train" else []), *text]) == 0, line
