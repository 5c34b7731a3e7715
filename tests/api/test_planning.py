"""Plans of models that raise or that an IPU rejects, and what `import raypod` exports and imports."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import pytest
import torch
from torch import nn

import raypod
from raypod import train
from raypod.__main__ import main
from raypod.api import planning
from raypod.errors import ConfigError
from tests.support.refused import one_line, rejects

COMMANDS = [["plan", "--memory"], ["plan", "--memory", "--json"], ["train", "--dry-run"]]


def bad_forward(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 10))


def bad_constructor(channels: int, classes: int) -> nn.Module:
    raise ValueError("no such\nlayer")


class ReadsAValue(nn.Linear):
    """Reads the value of a tensor, which an IPU rejects."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images.flatten(1))
        return logits if logits.sum() < 1e9 else logits + 1


def reads_a_value(channels: int, classes: int) -> nn.Module:
    return ReadsAValue(64, 10)


def plan(command: List[str], model: str, *flags: str) -> int:
    words = [*command[1:], "--model", f"{__name__}:{model}", "--device", "emulated", *flags]
    return train.main(words) if command[0] == "train" else main([command[0], *words])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("model", "cause"),
    [("bad_forward", "RuntimeError: mat1 and mat2 shapes"), ("bad_constructor", "ValueError: no such layer")],
)
def test_the_plan_of_a_model_that_raises_has_no_estimate(
    command: List[str], model: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(command, model) == 0
    assert f"{__name__}:{model}: {cause}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--pipeline-splits=1", "--pipeline-balance=parameters"])
def test_the_pipeline_of_a_model_that_raises_is_an_error(command: List[str], flag: str, capsys: Any) -> None:
    assert plan(command, "bad_forward", flag, "--ipus-per-replica", "2", "--gradient-accumulation", "3") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"raypod: error: {__name__}:bad_forward: RuntimeError: mat1" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_strict_mode_rejects_what_the_run_rejects(
    command: List[str], capsys: Any, caplog: Any, monkeypatch: Any
) -> None:
    assert plan(command, "reads_a_value") == 0
    assert "aten::item" in caplog.text
    capsys.readouterr()
    assert plan(command, "reads_a_value", "--strict") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"raypod: error: {__name__}:reads_a_value: poptorch.errors.Error: aten::item" in line
    assert "EMULATED_POD_STRICT" not in os.environ
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")  # applies unless it is off
    assert (plan(["plan"], "reads_a_value"), plan(["plan"], "reads_a_value", "--no-strict")) == (2, 0)
    assert os.environ["EMULATED_POD_STRICT"] == "1"


def test_a_model_that_does_not_fit_is_an_error_in_strict_mode(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With the micro-batch of the plan, which is larger than the compiled one."""
    monkeypatch.setattr("poptorch.device.compile.memory_estimate.MEMORY_BYTES", 20_000_000)
    flags = ["plan", "--memory", "--device", "emulated", "--model", "resnet8", "--batch-size", "256"]
    assert main(flags) == 0
    assert ": DOES NOT FIT" in capsys.readouterr().out
    line = one_line(capsys, main, [*flags, "--strict"])
    assert "raypod: error: resnet8: poptorch.errors.Error: Out of memory" in line
    assert main([*flags, "--strict", "--batch-size", "8"]) == 0


@pytest.mark.parametrize(
    ("value", "flags", "words"),
    [
        ("maybe", [], "='maybe': must be 0 or 1"),
        ("1", ["--precision", "16.32"], "=1: --precision 16.32 computes in half, which the compiled program cannot do"),
        ("1", [], "=1 needs (a C\\+\\+ compiler, and there is no no-such-compiler|torch 2.1)"),
    ],
)
def test_a_training_that_cannot_be_compiled_is_an_error_of_its_plan(
    value: str, flags: List[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("EMULATED_POD_COMPILE", value)
    for words_before in (["plan"], ["plan", "--json"], ["train", "--fleet", "inline", "--num-instances", "1"]):
        line = one_line(capsys, main, [*words_before, "--device", "emulated", *flags])
        assert re.match(f"raypod: error: EMULATED_POD_COMPILE{words}", line), line
    assert not list(tmp_path.iterdir())
    rejects(raypod.UserError, words, raypod.stream, device="emulated", precision=flags[-1] if flags else "32.32")
    cluster = tmp_path / "cluster.yaml"  # of hosts that may have a compiler, and IPUs
    cluster.write_text("provider: {type: local, head_ip: 10.0.0.1}\n")
    is_known = value == "maybe" or bool(flags)
    assert main(["plan", "--cluster", str(cluster), "--device", "emulated", *flags]) == (2 if is_known else 0)
    assert main(["plan", "--cluster", str(cluster), *flags]) == (2 if value == "maybe" else 0)


def test_ray_accepts_only_paths_in_utf8(make: Any) -> None:
    sections: Any = {"pod": {"executable_cache_path": "caf\udce9", "num_instances": 1}}
    words = r"pod.executable_cache_path: the name caf\\xe9 is not UTF-8, and Ray accepts no"
    with pytest.raises(ConfigError, match=words):
        planning.check_host(make(**sections, run={"fleet": "ray"}))
    planning.check_host(make(**sections, run={"fleet": "inline"}))


def test_importing_and_planning_import_neither_torch_nor_ray_and_training_not_sympy(
    run_python: Callable[[str], str], tmp_path: Path
) -> None:
    loaded = "sorted({'torch', 'ray', 'pydantic', 'numpy'} & set(sys.modules))"
    program = f"import sys, raypod; print(raypod.ConfigError.__name__, {loaded}); raypod.stream(device='emulated')"
    program += "; print({'torch', 'ray'} & set(sys.modules))"
    assert run_python(program).split() == ["ConfigError", "[]", "set()"]
    flags = f'"--fleet=inline", "--num-instances=1", "--batch-size=120", "--updates=1", "--run-dir={tmp_path}/run"'
    program = "import sys; from raypod.__main__ import main; import torch; before = set(sys.modules)"
    program += f"; code = main(['train', {flags}, '--quiet']); print(code, {{'sympy'}} & (set(sys.modules) - before))"
    assert run_python(program).splitlines()[-1] == "0 set()"


def test_every_exported_name_exists_and_is_documented_and_errors_are_of_one_tree() -> None:
    for name in raypod.__all__:
        value = getattr(raypod, name)
        assert name in dir(raypod)
        assert name == "STOP" or value.__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'fits'"):
        _ = raypod.fits
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
    assert module.__spec__.name == "raypod.training.data.digits"
    assert importlib.util.find_spec("raypod.datasets.no_such_module") is None
    from raypod.cli import lr_range

    with pytest.warns(DeprecationWarning, match="^raypod.commands is now raypod.cli;"):
        assert importlib.import_module("raypod.commands.lr_range") is lr_range


def test_the_former_path_of_private_py_still_checks(tmp_path: Path, processes: None) -> None:
    program = Path(raypod.__file__).parent / "host" / "private.py"
    for folder, code in ((tmp_path / "new", 0), (Path("/tmp"), 1)):
        assert subprocess.run([sys.executable, str(program), str(folder)], check=False).returncode == code
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
