"""The table of known differences from the SDK: every row names a test. Tests of rows that belong to no other file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import List, Set

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Line, options, seeded

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "reference/emulated-sdk.md"


def rows() -> List[List[str]]:
    """Return the cells of each row of the table."""
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


class Counts(nn.Module):
    """Has a branch that changes a captured tensor in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(1)

        def counted(value: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return value

        poptorch.cond(x.sum() > 0, counted, [x], counted, [x])
        return count


def test_a_branch_changes_a_captured_tensor() -> None:
    assert poptorch.inferenceModel(Counts())(torch.ones(1)).item() == 1


def test_executable_caching_writes_nothing(tmp_path: Path) -> None:
    opts = options().enableExecutableCaching(str(tmp_path / "cache"))
    poptorch.inferenceModel(seeded(Line), opts)(torch.ones(1))
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_wrapped_model_cannot_be_wrapped_until_it_is_destroyed() -> None:
    line = Line()
    training = poptorch.trainingModel(line, options())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(nn.Sequential(line), options())
    training(torch.ones(1))
    training.destroy()
    poptorch.trainingModel(nn.Sequential(line), options())


def test_two_models_are_attached_at_the_same_time() -> None:
    models = [poptorch.inferenceModel(nn.Linear(2, 1)) for _ in range(2)]
    for model in models:
        model(torch.ones(1, 2))
    assert all(model.isAttachedToDevice() for model in models)
