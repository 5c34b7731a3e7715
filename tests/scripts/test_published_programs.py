"""`scripts/run_published_programs.py`: its data, its rows, and how it reads a loss."""

from __future__ import annotations

import re

import psutil
import pytest
import run_published_programs as script

from raypod.system import torchvision_import
from tests.support import ROOT
from tests.support.bounded import wait_until


def test_every_row_is_in_the_documentation():
    documented = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs/reference/programs.md").read_text(), re.MULTILINE)
    assert documented == [program.name for program in script.programs()]


@pytest.mark.parametrize(
    ("output", "code", "result"),
    [
        ("loss: 2.0,\rloss: 1.5,\n", 0, "loss 2 -> 1.5 (falls; 2 values)"),
        ("loss: 1.5,\nloss: 2.0,\n", 0, "failed: loss 1.5 -> 2 (does not fall; 2 values)"),
        ("loss: 2e+01,\nloss: .5E-1,\n", 0, "loss 20 -> 0.05 (falls; 2 values)"),
        ("loss: 2.0.,\nloss: 3.,\nloss: 1,\n", 0, "loss 3 -> 1 (falls; 2 values)"),
        ("loss: 2.0,\nloss: nan,\nloss: 1.0,\n", 0, "failed: loss 2 -> 1 (not finite; 3 values)"),
        ("loss: 2.0,\nloss: -inf,\n", 0, "failed: loss 2 -> -inf (not finite; 2 values)"),
        ("done\n", 0, "failed: no loss in its output"),
        ("loss: 2.0,\nValueError: no\n\n", 1, "failed with exit code 1: ValueError: no"),
    ],
)
def test_the_result_of_a_run_is_its_losses_or_its_last_line(output, code, result):
    program = script.Program("name", "examples", "folder", "train.py", loss="loss: LOSS,")
    assert script.result_of(program, output, code) == result


def test_torchvision_reads_the_generated_mnist(tmp_path):
    torchvision_import.install()
    datasets = pytest.importorskip("torchvision.datasets")
    script.write_mnist(tmp_path, train=20, test=4)
    image, label = datasets.FashionMNIST(tmp_path, train=True)[19]
    assert (image.size, 0 <= label < 10) == ((28, 28), True)


def test_a_program_without_its_clone_is_not_run(tmp_path):
    program = script.Program("name", "examples", "folder", "train.py")
    assert script.Workspace(tmp_path, {}).run(program, 1.0) == "not run: no clone of examples is given"


@pytest.mark.parametrize("name", ["no-such-package", "pytest"])
def test_a_program_without_its_package_is_not_run(tmp_path, name):
    program = script.Program("name", "raypod", ".", "train.py", requires=f"{name}==0.0.1")
    assert script.Workspace(tmp_path, {}).run(program, 1.0).startswith(f"not run: needs {name}==0.0.1, found ")


@pytest.mark.parametrize("repository", ["examples", "optimum"])
def test_a_folder_that_is_no_clone_is_the_result_of_the_row(processes, tmp_path, repository):
    program = script.Program("name", "examples", "folder", "train.py")
    result = script.Workspace(tmp_path, {"examples": tmp_path, repository: tmp_path}).run(program, 1.0)
    assert result.startswith(f"failed: {tmp_path}: fatal: ")


def test_unknown_names_are_refused(capsys):
    for name, message in (("mnits", "'mnits'; did you mean mnist"), ("xyz", "or optimum-vit-2-instances?")):
        with pytest.raises(SystemExit) as refusal:
            script.main(["mnist", name])
        assert refusal.value.code == 2
        assert message in capsys.readouterr().err


def test_the_timeout_ends_a_program_that_ignores_sigterm(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "GRACE_S", 0.1)
    (tmp_path / "stuck.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child:\n    pathlib.Path('pid').write_text(str(child))\n"
        "time.sleep(60)\n"
    )
    program = script.Program("name", "raypod", str(tmp_path), "stuck.py")
    assert script.Workspace(tmp_path, {}).run(program, 0.5) == "failed: not finished after 0.5 s"
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
