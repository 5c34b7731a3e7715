"""The table of known differences from the SDK: every row names a test. Tests of rows that belong to no other file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import List, Set

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "reference/emulated-sdk.md"


def rows() -> List[List[str]]:
    table = PAGE.read_text().partition("## Known differences from the SDK")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def functions(file: Path) -> Set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_table_has_rows() -> None:
    assert len(rows()) > 30


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_names_a_test(row: List[str]) -> None:
    assert len(row) == 5, f"the row {row[0]!r} has {len(row)} cells, not 5"
    file, _, name = row[-1].strip("`").partition("::")
    assert file, f"the row {row[0]!r} names no test"
    assert name in functions(HERE / file)
