"""Values, flags and their help, YAML files and the mistakes in them, and what a stored configuration may import."""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Set

import numpy as np
import pytest
import yaml

from raypod.__main__ import main
from raypod.errors import ConfigError, DataMissing
from raypod.plan import compatibility, config, flags, layout, resolve, stored_code, user_code
from raypod.plan.plan import Plan
from raypod.plan.unique_keys import DuplicateKey, UniqueKeyLoader, syntax_error
from raypod.plan.values import Interval, parse_interval
from raypod.runs import run_folder
from raypod.system.command_line import FlagParser
from raypod.training.tasks.registry import load_config
from tests.support.refused import refused

NAN = float("nan")
DUPLICATE = "epochs is a duplicate key, first given in line 2"


def load_yaml(path: Path) -> config.Config:
    """Return the config of a YAML file alone."""
    return resolve.from_values(resolve.read_yaml(path), str(path))


def test_an_interval_is_in_updates_epochs_or_minutes() -> None:
    for text, interval, updates, seconds in [
        ("100 updates", Interval(100, "update"), 100, float("inf")),
        ("1 epoch", Interval(1, "epoch"), 44, float("inf")),
        ("0.5 minutes", Interval(0.5, "minute"), 0, 30),
    ]:
        assert (parse_interval(text), interval.updates(44), interval.seconds) == (interval, updates, seconds)
    for text, words in (
        ("often", "a number and its unit"),
        ("0 minutes", "positive"),
        ("1.5 epochs", "a whole number"),
    ):
        with pytest.raises(ValueError, match=words):
            parse_interval(text)


def test_a_config_is_immutable_has_unique_keys_and_names_all_unknown_ones() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.Config().training.seed = 3  # type: ignore[misc]
    keys = [key for _, key, _ in config.fields()]
    assert len(keys) == len(set(keys)), "flags have no section, so keys must be unique over all sections"
    values = {"trainig": {}, "training": {"epoch": 3, "batchsize": 2}}
    with pytest.raises(ConfigError) as error:
        resolve.from_values(values, "my.yaml")
    assert str(error.value).split("\n  ") == [
        "3 mistakes",
        "unknown section 'trainig' in my.yaml; did you mean training?",
        "unknown key training.epoch in my.yaml; did you mean training.epochs?",
        "unknown key training.batchsize in my.yaml; did you mean training.batch_size?",
    ]


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("run", "run_dir", "", "must not be empty"),
        ("run", "resume", " ", "must not be empty"),
        ("pod", "cluster", "", "must not be empty"),
        ("training", "batch_size", True, "must not be a boolean"),
        ("training", "learning_rate", True, "must not be a boolean"),
        ("training", "batch_size", 0, "^training.batch_size = 0: must be at least 1$"),
        ("training", "epochs", "x", "^training.epochs = 'x': must be a whole number$"),
        ("training", "learning_rate", "fast", "learning_rate = 'fast': must be a number$"),
        ("training", "precision", "8.8", "precision = '8.8': must be '16.16', '16.32' or '32.32'$"),
        ("training", "optimizer", {"a": "b"}, "^training.optimizer = .* must be 'sgd', 'adam'"),
        ("data", "augment", "maybe", "augment = 'maybe': must be true or false$"),
        ("data", "image", "3x32x32\n", "must be channels x height x width"),
        ("data", "image", "3x3", "image = '3x3': must be channels x height x width, as in 3x32x32$"),
        ("training", "lr_steps", [True], "must be a list of numbers"),
        ("training", "lr_steps", [30, 10], "must be in ascending order"),
        ("training", "lr_steps", "10,,20", "without empty entries"),
        ("training", "lr_steps", [], "without empty entries"),
        ("training", "pipeline_splits", "a,", "without empty entries"),
        ("training", "pipeline_splits", ["a", "a"], "a is listed twice"),
        ("training", "pipeline_splits", "a,b=1", "b=1 is on the IPU of the stage before it"),
        ("training", "pipeline_splits", "a=x", "write MODULE, or MODULE=IPU"),
        ("training", "layers_per_ipu", "3,-1", "must be at least 0"),
        ("training", "momentum", NAN, "= nan: must be less than 1$"),
        ("training", "weight_decay", NAN, "= nan: must be a finite number$"),
        ("training", "learning_rate", NAN, "= nan: must be a finite number$"),
        *(("run", key, "inf", "= 'inf': must be at most 1000000$") for key in ("start_timeout_s", "stuck_after_s")),
        *(("run", key, -1, "= -1: must be greater than 0$") for key in ("start_timeout_s", "stuck_after_s")),
    ],
)
def test_values_without_a_meaning_are_errors(section: str, key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve.from_values({section: {key: value}})


def parse(*argv: str) -> config.Config:
    parser = FlagParser(prog="test")
    flags.add_flags(parser)
    return resolve.resolve(parser.parse_args(argv))


def test_flags_override_yaml_and_yaml_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {batch_size: 16, epochs: 3}\npod: {replicas: 8}\n")
    found = parse("--config", str(file), "--epochs", "5", "training.seed=7")
    assert (found.training.batch_size, found.training.epochs, found.training.seed) == (16, 5, 7)
    assert (found.pod.replicas, found.training.gradient_accumulation) == (8, 1)
    assert (parse("--num-replicas", "8").pod.replicas, parse()) == (8, config.Config())
    found = parse("--num-ipus", "8", "--ipus-per-replica", "2", "--async-dataloader", "training.learning_rate=1e-3")
    (tmp_path / "config.yaml").write_text(found.to_yaml())
    assert (load_yaml(tmp_path / "config.yaml"), found.training.learning_rate) == (found, 0.001)
    assert parse("--num-ipus", "16", "--ipus-per-replica", "2").pod.replicas == 8
    for argv, instances in (((), 2), (("--replicas", "3"), 1), (("--fleet", "inline"), 1)):
        assert parse(*argv).pod.num_instances == instances
    assert parse("--num-instances", "3").pod.replicas == 6  # the default, 4, rounded up
    assert parse("--num-instances", "3", "--replicas", "4").pod.replicas == 4  # which the plan rejects
    for text in ("16.16", "16.32", "32.32"):  # which YAML parses as a number
        file.write_text(f"training: {{precision: {text}}}\n")
        assert load_yaml(file).training.precision == parse(f"training.precision={text}").training.precision == text


def test_a_data_set_replaces_that_of_the_config_or_of_the_resumed_run_and_its_folder(tmp_path: Path) -> None:
    def data_dir(*words: str) -> object:
        return parse(*words).data.data_dir

    own, file, resumed = tmp_path / "own.yaml", tmp_path / "config.yaml", ("--resume", str(tmp_path))
    own.write_text("data: {dataset: cifar10, data_dir: /images}\n")
    assert data_dir("--config", str(own), "--dataset", "synthetic") is None
    assert data_dir("--config", str(own), "--dataset", "cifar100") == "/images"
    file.write_text(parse("--batch-size", "16", "--optimizer", "adam", "--run-dir", str(tmp_path)).to_yaml())
    again = parse(*resumed, "--epochs", "3").training
    assert (again.batch_size, again.optimizer, again.epochs) == (16, "adam", 3)
    for each in (own, file):
        each.write_text("data: {dataset: synthetic, data_dir: /images}\n")
    assert (data_dir("--config", str(own)), data_dir(*resumed)) == ("/images", None)  # the plan rejects the first
    assert data_dir(*resumed, "--data-dir", "/x") == "/x"  # the plan rejects it
    assert data_dir(*resumed, "--dataset", "imagefolder") == "/images"
    file.write_text("task: {name: 'module:Task'}\ndata: {data_dir: /texts}\n")
    (tmp_path / layout.SEAL).write_text(str(stored_code.seal_of(file.read_bytes())))
    assert data_dir(*resumed) == "/texts"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--batch-sice", "4"), ["--batch-sice", "--batch-size"]),
        (("training.batchsize=4",), ["training.batchsize", "training.batch_size"]),
        (("--config", "digits", "training.bogus=4"), ["training.bogus in the command line; known: ", "training.lr_st"]),
        (("pod.seed=4",), ["pod.seed", "training.seed"]),
        (("trainin.seed=4",), ["trainin", "training"]),
        (("seed",), ["'seed'", "section.key=value, as in training.batch_size=8"]),
        (("epochs=3",), ["cannot read 'epochs=3': write section.key=value; did you mean training.epochs=3?"]),
        (("batch-size=3",), ["; did you mean training.batch_size=3?"]),
        (("hidden=3",), ["section.key=value, as in training.batch_size=8"]),
        (("--epochs", "0"), ["training.epochs", "'0'", "1"]),
        (("--epochs", "9" * 20), ["training.epochs", "100000"]),
        (("--learning-rate", "inf"), ["training.learning_rate", "finite"]),
        (("--image-size", "9" * 20), ["data.image_size", "16384"]),
        (("--model", "resnet9"), ["training.model = 'resnet9': known are", "resnet8"]),
        (("--replicas", "four"), ["pod.replicas", "four"]),
        (("--batch-size",), ["--batch-size", "expected one argument"]),
        (("--num-ipus", "7", "--ipus-per-replica", "2"), ["7", "2"]),
        (("--num-ipus", "8", "--replicas", "4", "--ipus-per-replica", "4"), ["4 replicas x 4", "16", "8"]),
        (("--seed", "1", "training.seed=2"), ["training.seed", "1", "2"]),
        (("--config", "/nowhere.yaml"), ["/nowhere.yaml", "No such file"]),
        (("--config", sys.executable), [sys.executable, "not a text file"]),
        (("--image", "0x8x8"), ["data.image = '0x8x8'"]),
    ],
)
def test_a_mistake_is_reported_in_one_line(argv: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "") for text in ("- 1\n", "run: {}\nrun: {}\n", "training: {seed: [}\n", "training: {seeed: 1}\n")),
        *((f"training: {section}\n", "expected sections") for section in ("3", "[]", "0", "false", '""')),
        ("training:\n  epochs: 2\n  batch_size: 8\n  epochs: 3\n", f"config.yaml, line 4: {DUPLICATE}"),
        ("training: {1: 2}\n", r"unknown key training\.1 "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words or r"config\.yaml"):
        load_yaml(file)


def test_a_duplicate_key_with_its_lines_and_too_many_levels_are_errors() -> None:
    for text in ("a: 1\nb: 2\na: 3", "- {a: 1,\n   b: {x: 1},\n   a: 2}", "c:\n  a: 1\n\n  a: 1"):
        with pytest.raises(DuplicateKey, match="^a is a duplicate key, first given in line ") as error:
            yaml.load(text, UniqueKeyLoader)
        assert error.value.line > error.value.first_line
    assert yaml.load("x: &x {a: 1}\ny: {<<: *x, a: 2}", UniqueKeyLoader)["y"] == {"a": 2}
    for text in ("[" * 101 + "]" * 101, "[" * 5_000 + "]" * 5_000, "{a: " * 200 + "1" + "}" * 200):
        with pytest.raises(yaml.YAMLError, match="nested too deeply"):
            yaml.load(text, UniqueKeyLoader)
    assert yaml.load("{b: [" + "{a: [1]}, " * 500 + "]}", UniqueKeyLoader) == {"b": [{"a": [1]}] * 500}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n\tb: 1", r"line 2: found character '\\t' that .*: a tab; YAML is indented with spaces$"),
        ("a:\n  b 1\n  c: 2", r"line 3: mapping .* here: is it indented too far, is a colon missing before it"),
        ("a: 1\nb:2  # c\nd: 3", r"line 3: could not .*: is a colon missing, or the space after it\?$"),
        ("a: b: c", r"or must its value be quoted\?$"),
        ("a: 'b\nc: d", r"\(while scanning a quoted scalar that begins in line 1\): its quote is not closed$"),
        ("a: 'b\nc: 'd'", r"line 2: .*: is a quote not closed, or does text follow a closing quote or bracket\?$"),
        ("a: [b] c", r": is a quote not closed, or does text follow a closing quote or bracket\?$"),
        ("a:\n  b: 1\n c: 2", r"line 3: .*: indent it like the other keys of this section$"),
        ("a: 1\n- b", r"line 2: .*: indent it like the other keys of this section$"),
    ],
)
def test_a_syntax_error_is_explained(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError) as error:
        yaml.load(text, UniqueKeyLoader)
    assert re.search(words, syntax_error("config.yaml", error.value))


def shown(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> List[str]:
    """The flags that have an entry of their own."""
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def test_help_shows_what_is_used_most_and_each_flag_is_in_one_group(capsys: Any) -> None:
    text = shown(capsys, "train", "--help")
    assert 20 <= len(flags_in(text)) <= 24
    assert {"--config", "--task", "--dataset", "--model", "--epochs", "--replicas", "--cluster"} <= {*flags_in(text)}
    assert "--stuck-after-s" not in text
    assert "--help-all every flag" in " ".join(text.split())
    assert text == shown(capsys, "train", "-h")
    assert max(map(len, text.splitlines())) <= 80
    of_groups = [flag for group in flags.GROUPS for flag in flags_in(shown(capsys, "train", "--help", group))]
    assert len(of_groups) == len(set(of_groups))
    keys = {f"--{'task' if key == 'name' else key.replace('_', '-')}" for _, key, _ in config.fields()}
    assert keys <= {*of_groups}
    assert {*flags_in(shown(capsys, "train", "--help-all"))} == {*of_groups, "--config"}
    for command, own in (("plan", {"--json", "--memory"}), ("doctor", {"--json", "--timeout"})):
        text = shown(capsys, command, "--help")
        assert own <= {*flags_in(text)}
        assert "Train a model" not in text


@pytest.mark.parametrize(
    ("group", "lines"),
    [
        ("training", ["--batch-size N micro-batch size: samples per forward pass [integer >= 1; default: 8]"]),
        ("training", ["--seed N", "[integer >= 0, < 2^31; default: 42]"]),
        ("data", ["--augment randomly crop", "[on by default]", "--download", "[off by default]"]),
        ("checkpoints", ["--checkpoint-every INTERVAL", "--save-timeout-s SECONDS", "--resume PATH"]),
        ("failures", ["--on-nonfinite {stop,continue} reaction to a loss that is NaN or infinite [default: stop]"]),
    ],
)
def test_an_entry_has_type_range_and_default(group: str, lines: Sequence[str], capsys: Any) -> None:
    text = " ".join(shown(capsys, "train", "--help", group).split())
    assert all(line in text for line in lines)


def test_an_unknown_group_is_a_mistake_and_other_parsers_keep_their_help(capsys: Any) -> None:
    assert main(["train", "--help", "dta"]) == 2
    groups = "task, data, model, training, ipu, pod, checkpoints, failures, output"
    assert capsys.readouterr().err == f"raypod: error: --help dta: no such group (of {groups}); did you mean data?\n"
    parser = FlagParser(prog="test")
    flags.add_flags(parser)
    assert "--stuck-after-s SECONDS" in parser.format_help()
    assert "--help-all" not in parser.format_help()


def flat(**changes: Any) -> Dict[str, Any]:
    """Return the default settings by full name, with changes as in `data__dataset="synthetic"`."""
    sections = config.Config().model_dump()
    found = {f"{section}.{key}": value for section, content in sections.items() for key, value in content.items()}
    return {**found, **{name.replace("__", "."): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "shown", "left_out"),
    [
        ({}, {"training.momentum", "training.lr_floor"}, {"data.classes", "data.samples", "training.lr_gamma"}),
        ({"data__dataset": "imagefolder"}, {"data.jpeg_decoder", "data.data_dir"}, {"data.classes", "data.image"}),
        ({"data__dataset": "synthetic"}, {"data.classes", "data.image", "data.samples"}, {"data.download"}),
        ({"data__dataset": "my:data"}, {"data.classes"}, {"data.samples", "data.jpeg_decoder"}),
        ({"training__optimizer": "adam"}, set(), {"training.momentum"}),
        ({"training__lr_schedule": "step"}, {"training.lr_steps", "training.lr_gamma"}, {"training.lr_floor"}),
        ({"data__augment": False}, {"data.augment"}, {"data.flip", "data.crop_padding"}),
        ({"run__trackers": ("wandb",)}, {"run.tracker_timeout_s"}, {"run.storage_timeout_s", "run.reset_timeout_s"}),
        ({"run__storage_path": "/s"}, {"run.storage_timeout_s", "run.keep_remote"}, {"run.tracker_artifacts"}),
        ({"data__dataset": "imagefolder"}, {"data.policy"}, {"data.rand_augment_ops", "data.cutmix_disable_prob"}),
        ({"data__dataset": "imagefolder", "data__policy": "rand-augment"}, {"data.rand_augment_magnitude"}, set()),
        ({"task__name": "my:Task"}, {"data.num_workers"}, {"training.model", "data.dataset", "data.jpeg_decoder"}),
    ],
)
def test_settings_without_an_effect_are_left_out(changes: Dict[str, Any], shown: Set[str], left_out: Set[str]) -> None:
    names = set(compatibility.with_effect(flat(**changes)))
    assert shown <= names
    assert not left_out & names


def test_the_names_exist_and_a_config_without_the_deciding_setting_is_shown() -> None:
    assert {*compatibility.IMAGE_KEYS, *compatibility._NEEDS} <= set(flat())
    assert {deciding for deciding, _ in compatibility._NEEDS.values()} <= set(flat())
    given = {"data.classes": 10, "run.tracker_timeout_s": 1}
    assert compatibility.with_effect(given) == given


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
    refused(message, resolve.combine, given, config)
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
    refused("no subclass of raypod.Task", load_config, folder / "config.yaml", ["foreign:make", "theirs.yaml"])
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


def test_the_place_in_the_users_code_survives_pickling_and_is_a_part_of_one_line(outer: Any, tmp_path: Path) -> None:
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
    error = raised_by(lambda: outer(None))
    user_code.record_place(error)
    arrived = pickle.loads(pickle.dumps(error))
    assert arrived.__traceback__ is None
    assert user_code.place_of(arrived) == " (houses.py:3, in parse)"
    error = raised_by(lambda: outer("{"))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    of_worker = ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {text}")
    assert user_code.place_of(of_worker) == " (houses.py:3, in parse)"
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
    refused(words.format(tmp_path), user_code.import_name, name, "k")
