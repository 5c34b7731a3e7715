"""Values, flags and their help, YAML files and the mistakes in them, and settings without an effect."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence, Set

import pytest
import yaml

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan import compatibility, config, flags, layout, resolve, stored_code
from raypod.plan.unique_keys import DuplicateKey, UniqueKeyLoader, syntax_error
from raypod.plan.values import Interval, parse_interval
from raypod.system.command_line import FlagParser

NAN = float("nan")
DUPLICATE = "epochs is a duplicate key, first given in line 2"


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


def test_a_config_is_immutable_and_has_unique_keys() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.Config().training.seed = 3  # type: ignore[misc]
    keys = [key for _, key, _ in config.fields()]
    assert len(keys) == len(set(keys)), "flags have no section, so keys must be unique over all sections"


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
    assert (resolve.load_yaml(tmp_path / "config.yaml"), found.training.learning_rate) == (found, 0.001)
    assert parse("--num-ipus", "16", "--ipus-per-replica", "2").pod.replicas == 8
    for argv, instances in (((), 2), (("--replicas", "3"), 1), (("--fleet", "inline"), 1)):
        assert parse(*argv).pod.num_instances == instances
    assert parse("--num-instances", "3").pod.replicas == 6  # the default, 4, rounded up
    assert parse("--num-instances", "3", "--replicas", "4").pod.replicas == 4  # which the plan rejects
    for text in ("16.16", "16.32", "32.32"):  # which YAML parses as a number
        file.write_text(f"training: {{precision: {text}}}\n")
        assert (
            resolve.load_yaml(file).training.precision == parse(f"training.precision={text}").training.precision == text
        )


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
        resolve.load_yaml(file)


def test_a_duplicate_key_is_an_error_with_both_lines_and_may_override_a_merged_one() -> None:
    for text in ("a: 1\nb: 2\na: 3", "- {a: 1,\n   b: {x: 1},\n   a: 2}", "c:\n  a: 1\n\n  a: 1"):
        with pytest.raises(DuplicateKey, match="^a is a duplicate key, first given in line ") as error:
            yaml.load(text, UniqueKeyLoader)
        assert error.value.line > error.value.first_line
    assert yaml.load("x: &x {a: 1}\ny: {<<: *x, a: 2}", UniqueKeyLoader)["y"] == {"a": 2}


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


def test_all_unknown_keys_are_reported_at_once() -> None:
    values = {"trainig": {}, "training": {"epoch": 3, "batchsize": 2}}
    with pytest.raises(ConfigError) as error:
        resolve.from_values(values, "my.yaml")
    assert str(error.value).split("\n  ") == [
        "3 mistakes",
        "unknown section 'trainig' in my.yaml; did you mean training?",
        "unknown key training.epoch in my.yaml; did you mean training.epochs?",
        "unknown key training.batchsize in my.yaml; did you mean training.batch_size?",
    ]


def test_too_many_levels_are_an_error_and_nodes_beside_each_other_are_none() -> None:
    for text in ("[" * 101 + "]" * 101, "[" * 5_000 + "]" * 5_000, "{a: " * 200 + "1" + "}" * 200):
        with pytest.raises(yaml.YAMLError, match="nested too deeply"):
            yaml.load(text, UniqueKeyLoader)
    assert yaml.load("{b: [" + "{a: [1]}, " * 500 + "]}", UniqueKeyLoader) == {"b": [{"a": [1]}] * 500}


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
