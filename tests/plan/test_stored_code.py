"""What the configuration of a run folder may import, and the messages about the user's code."""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError, DataMissing
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
    content = (folder / "config.yaml").read_text()
    for kept in (0, 0.5):  # it is cut off, and not read as defaults
        (folder / "config.yaml").write_text(content[: int(len(content) * kept)])
        with pytest.raises(
            ConfigError, match=f"^{folder}/config.yaml is cut off, and the settings of the run are lost"
        ):
            load_config(folder / "config.yaml")


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


HOUSES = """import json
def parse(text):
    return json.loads(text)
def outer(text):
    return parse(text)
"""


def functions(file: str) -> Dict[str, Any]:
    """The functions of a user's module, which call the standard library."""
    found: Dict[str, Any] = {}
    exec(compile(HOUSES, file, "exec"), found)
    return found


@pytest.fixture
def outer(tmp_path: Path) -> Callable[[str], Any]:
    return functions(str(tmp_path / "houses.py"))["outer"]


def raised_by(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - returned
        function()
    return raised.value


def test_the_place_is_the_innermost_frame_of_the_users_code_and_the_function_that_raypod_called(
    outer: Any, tmp_path: Path
) -> None:
    assert user_code.place_of(raised_by(lambda: outer("{"))) == " (houses.py:3, in parse)"
    of_script = functions("<dynamic-code>")  # as cloudpickle names it
    assert user_code.place_of(raised_by(lambda: of_script["parse"]("{"))) == " (line 3, in parse)"
    of_numpy = raised_by(lambda: np.zeros((2, 3)).reshape(4))
    of_numpy.__traceback__ = None
    assert user_code.place_of(of_numpy) == ""
    own: Dict[str, Any] = {"parse": outer}
    exec(compile("def datasets():\n\n    return parse('{')\n", str(tmp_path / "mine.py"), "exec"), own)
    error = raised_by(lambda: user_code.invoke(own["datasets"], "mine:datasets", "task.name"))
    assert user_code.place_of(error) == " (mine.py:3, in datasets; houses.py:3, in parse)"


def test_the_place_survives_pickling_and_loader_workers(outer: Any) -> None:
    error = raised_by(lambda: outer(None))
    user_code.record_place(error)
    arrived = pickle.loads(pickle.dumps(error))
    assert arrived.__traceback__ is None
    assert user_code.place_of(arrived) == " (houses.py:3, in parse)"
    error = raised_by(lambda: outer("{"))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    of_worker = ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {text}")
    assert user_code.place_of(of_worker) == " (houses.py:3, in parse)"


def test_an_error_of_the_users_code_is_one_line_with_a_remark(outer: Any) -> None:
    expected = r"^houses:outer: TypeError: .*; houses.py:3, in parse\); called with None$"
    with pytest.raises(ConfigError, match=expected), user_code.reported("houses:outer", "; called with None"):
        outer(None)
    with pytest.raises(DataMissing, match="^no file$"), user_code.reported("houses:outer", "; called with None"):
        raise DataMissing("no file")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("houses_of.py:load", "k = 'houses_of.py:load': No module named .*; omit .py: houses_of:load$"),
        ("no_houses.py:load", "No module named 'no_houses'; omit .py: no_houses:load$"),
        ("no_houses:load", r"No module named 'no_houses' in the current folder \({}\), in PYTHONPATH or among th"),
        *(
            (f"{each}:exec", "is a module of Python itself")
            for each in ("os", "subprocess", "builtins", "sys", "posix")
        ),
        ("own_houses:load", "k = 'own_houses:load': No module named 'no_such_package'$"),
    ],
)
def test_modules_that_are_not_found_have_a_way_out_and_those_of_python_are_never_called(
    name: str, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "houses_of.py").write_text("")
    (tmp_path / "own_houses.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words.format(tmp_path)):
        user_code.import_name(name, "k")
