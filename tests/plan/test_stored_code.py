"""What the configuration of a run folder may decide, where the run is the user's own and where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan import resolve, stored_code, user_code
from raypod.plan.plan import Plan
from raypod.runs import run_folder
from raypod.training.tasks.registry import load_config

MODULE = """
from pathlib import Path
Path({mark!r}).touch()
def make(*arguments): raise AssertionError
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that exists once the module `foreign` of the current folder has been imported."""
    (tmp_path / "foreign.py").write_text(MODULE.format(mark=str(tmp_path / "imported")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "foreign", raising=False)
    return tmp_path / "imported"


def _stored(tmp_path: Path, text: str) -> Path:
    """A run folder from elsewhere."""
    folder = tmp_path / "stored"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    return folder


CASES = {
    "data: {dataset: foreign:make}": "data.dataset = 'foreign:make'.*--dataset foreign:make",
    "task: {name: foreign:make}": "task.name = 'foreign:make'.*--task foreign:make",
    "training: {model: foreign:make}": "training.model = 'foreign:make'.*--model foreign:make",
    "training: {lr_schedule: foreign:make}": "--lr-schedule foreign:make",
    "ipu: {popart: {customCodelets: [x.cpp]}}": "ipu.popart = 'customCodelets'.*--popart customCodelets",
    "ipu: {popart: {cachePath: theirs}}": "ipu.popart = 'cachePath'.*--popart cachePath",
    "ipu: {ipu_config: theirs.json}": "add --ipu-config theirs.json",
    "pod: {cluster: theirs.yaml}": "names code, pod.cluster = 'theirs.yaml'.*--cluster theirs.yaml",
    "pod: {executable_cache_path: theirs}": "add --executable-cache-path theirs",
    "run: {trackers: [foreign:make]}": "--tracker foreign:make",
    "run: {reset_command: 'touch x'}": "add --reset-command 'touch x' to use it",
    "run: {storage_path: 's3://theirs/x'}": "add --storage-path s3://theirs/x",
}


@pytest.mark.parametrize(("text", "message"), CASES.items())
@pytest.mark.parametrize("flag", ["--resume", "--config"])
def test_a_stored_configuration_imports_nothing_that_the_command_does_not_name(
    text: str, message: str, flag: str, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _stored(tmp_path, text)
    source = folder if flag == "--resume" else folder / "config.yaml"
    given, config = ({"run.resume": str(source)}, None) if flag == "--resume" else ({}, str(source))
    with pytest.raises(ConfigError, match=message):
        resolve.combine(given, config)
    for command in (["plan"], ["train", "--dry-run"], ["train"], ["doctor"]):
        assert main([*command, flag, str(source), "--device", "emulated"]) == 2
        error = capsys.readouterr().err
        assert "was not written by you on this host" in error
        assert len(error.splitlines()) == 1
    assert not mark.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize("command", ["evaluate", "predict", "average", "export"])
def test_trained_models_import_code_only_if_the_command_trusts_it(
    command: str, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _stored(tmp_path, "task: {name: foreign:make}\npod: {cluster: theirs.yaml}")
    more = {"predict": ["image.png"], "export": ["--format", "onnx"]}.get(command, [])
    assert main([command, str(folder), *more]) == 2
    assert "add --trust theirs.yaml --trust foreign:make" in capsys.readouterr().err
    assert not mark.exists()
    with pytest.raises(ConfigError, match="no subclass of raypod.Task"):
        load_config(folder / "config.yaml", ["foreign:make", "theirs.yaml"])
    assert mark.exists()


def test_a_name_on_the_command_line_counts_and_replaces_the_stored_one(tmp_path: Path) -> None:
    folder = _stored(tmp_path, "training: {model: foreign:make}\nrun: {storage_path: 's3://theirs/x'}")
    given: Dict[str, Any] = {"run.resume": str(folder), "training.model": "mine:make", "run.storage_path": None}
    values, _ = resolve.combine(given, None)
    assert values["training"]["model"] == "mine:make"
    assert values["run"]["storage_path"] is None


def test_a_run_of_this_user_is_its_own_until_its_configuration_changes(make: Callable[..., Plan]) -> None:
    plan = make(run={"storage_path": "s3://mine/x"})
    run_folder.create(plan)
    folder = Path(plan.run_dir)
    assert stored_code.is_own(folder)
    assert resolve.combine({"run.resume": str(folder)}, None)[0]["run"]["storage_path"] == "s3://mine/x"
    with (folder / "config.yaml").open("a") as file:
        file.write("# changed\n")
    assert not stored_code.is_own(folder)
    # A run that is resumed from its URL is mirrored there: the command names it.
    stored_code.check_storage({"run": {"storage_path": "s3://mine/x"}}, folder / "config.yaml", "s3://mine/x/run")
    with pytest.raises(ConfigError, match="asks to mirror"):
        stored_code.check_storage({"run": {"storage_path": "s3://mine/x"}}, folder / "config.yaml", "s3://mine/xy/run")


@pytest.mark.parametrize("kept", [0, 0.5])
def test_a_configuration_that_is_cut_off_is_not_read_as_defaults(make: Callable[..., Plan], kept: float) -> None:
    plan = make()
    run_folder.create(plan)
    path = Path(plan.run_dir) / "config.yaml"
    content = path.read_text()
    path.write_text(content[: int(len(content) * kept)])
    with pytest.raises(ConfigError, match=f"^{path} is cut off, and the settings of the run are lost"):
        load_config(path)


def test_the_key_is_private_and_its_absence_trusts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seal = stored_code.seal_of(b"content")
    (key,) = (tmp_path / "state" / "raypod").iterdir()
    assert (key.stat().st_mode & 0o777, seal) == (0o600, stored_code.seal_of(b"content"))
    monkeypatch.setattr(stored_code, "_keys", {})
    key.chmod(0o644)  # others may have read it
    assert stored_code.seal_of(b"content") is None
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert stored_code.seal_of(b"content") is None
    assert not stored_code.is_own(tmp_path)


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "builtins:exec", "sys:exit", "posix:system"])
def test_python_s_own_functions_are_never_called(name: str) -> None:
    with pytest.raises(ConfigError, match="is a module of Python itself"):
        user_code.import_name(name, "data.dataset")
