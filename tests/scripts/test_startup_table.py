"""scripts/startup_table.py: where the start-up time of runs went, as a Markdown table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from run_folders import write_run

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import startup_table

    return startup_table


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["startup_table.py", *words])
    return int(script.main())


def test_a_run_is_a_column(script: Any, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "a")
    assert run(script, monkeypatch, str(tmp_path / "a")) == 0
    rows: Dict[str, List[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        _, name, *cells, _ = (cell.strip() for cell in line.split("|"))
        rows[name] = cells
    assert rows["step"] == ["a"]
    assert rows["start the instances"] == ["4.00 s"]
    assert (rows["everything else"], rows["total"]) == (["1.00 s"], ["5.00 s"])
    assert rows["until the first update"] == ["6.50 s"]


def test_a_run_that_has_not_started_is_one_line(script: Any, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "a" / "events.jsonl").write_text("")
    assert run(script, monkeypatch, str(tmp_path / "a")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run_started" in line
