"""The table of a run's files agrees with what writes them, and with the page that describes them."""

from __future__ import annotations

import re

from raypod.plan import layout
from tests.support import ROOT


def test_every_file_has_its_writer_and_its_line_in_the_documentation() -> None:
    source = (ROOT / "raypod/plan/layout.py").read_text()
    constants = re.findall(r"^    RunFile\((\w+),", source, re.MULTILINE)
    page = (ROOT / "docs/reference/run-folder.md").read_text()
    documented = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    for constant, file in zip(constants, layout.TABLE):
        assert re.search(rf"\b{constant}\b", (ROOT / f"raypod/{file.writer}.py").read_text()), file
        assert any(name.split("/")[0] == file.name for name in documented), file.name
    known = {file.name for file in layout.TABLE}
    files = [name for name in documented if re.fullmatch(r"[a-z-]+\.(json|jsonl|yaml|seal|html)", name)]
    assert {name for name in files if name not in known} == set()
    assert len(known) == len(layout.TABLE) == len(constants)
