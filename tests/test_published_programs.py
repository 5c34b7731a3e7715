"""`scripts/run_published_programs.py`: its data, its rows, and how it reads a loss."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent


@pytest.fixture(name="script")
def imported_script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(HOME / "scripts"), *sys.path])
    import run_published_programs  # after the path is set

    return run_published_programs


def test_every_row_is_in_the_documentation(script):
    documented = re.findall(r"^\| `([\w.-]+)` \|", (HOME / "docs/programs.md").read_text(), re.MULTILINE)
    assert documented == [program.name for program in script.programs()]


@pytest.mark.parametrize(
    ("output", "code", "result"),
    [
        ("loss: 2.0,\rloss: 1.5,\n", 0, "loss 2 -> 1.5 (falls; 2 values)"),
        ("loss: 1.5,\nloss: 2.0,\n", 0, "loss 1.5 -> 2 (does NOT fall; 2 values)"),
        ("done\n", 0, "failed: no loss in its output"),
        ("loss: 2.0,\nValueError: no\n\n", 1, "failed with exit code 1: ValueError: no"),
    ],
)
def test_the_result_of_a_run_is_its_losses_or_its_last_line(script, output, code, result):
    program = script.Program("name", "examples", "folder", "train.py", loss=r"loss: ([\d.]+),")
    assert script.result_of(program, output, code) == result


def test_torchvision_reads_the_generated_mnist(script, tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    script.write_mnist(tmp_path, train=20, test=4)
    image, label = datasets.FashionMNIST(tmp_path, train=True)[19]
    assert (image.size, 0 <= label < 10) == ((28, 28), True)


def test_a_program_without_its_clone_is_not_run(script, tmp_path):
    place = script.Workplace(tmp_path, {})
    program = script.Program("name", "examples", "folder", "train.py")
    assert place.run(program, 1.0) == "not run: no clone of examples is given"
