from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypod import cli
from raypod.errors import ConfigError
from raypod.plan import config, flags, resolve

DIGITS = Path(__file__).resolve().parents[2] / "configs" / "digits.yaml"
REQUIRED_FLAGS = [
    "--batch-size",
    "--epochs",
    "--precision",
    "--gradient-accumulation",
    "--device-iterations",
    "--async-dataloader",
    "--eight-bit-io",
    "--num-workers",
    "--replicas",
    "--num-replicas",
    "--num-instances",
    "--ipus-per-replica",
    "--num-ipus",
    "--model",
    "--dataset",
    "--data-dir",
    "--optimizer",
    "--learning-rate",
    "--reduction",
    "--seed",
    "--run-dir",
    "--resume",
    "--device",
    "--fleet",
    "--collectives",
    "--updates",
    "--config",
    "--cluster",
]


def parse(*argv: str) -> config.Config:
    parser = cli.FlagParser(prog="test")
    flags.add_flags(parser)
    return resolve.resolve(flags.parse_arguments(parser, argv))


def test_without_flags_the_config_is_the_default() -> None:
    assert parse() == config.Config()


@pytest.mark.parametrize("flag", REQUIRED_FLAGS)
def test_the_flag_exists(flag: str) -> None:
    parser = cli.FlagParser(prog="test")
    flags.add_flags(parser)
    assert flag in parser.format_help()


def test_flags_override_yaml_and_yaml_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {batch_size: 16, epochs: 3}\npod: {replicas: 8}\n")
    found = parse("--config", str(file), "--epochs", "5", "training.seed=7")
    assert (found.training.batch_size, found.training.epochs, found.training.seed) == (16, 5, 7)
    assert (found.pod.replicas, found.training.gradient_accumulation) == (8, 1)


def test_the_resolved_config_reloads_equal(tmp_path: Path) -> None:
    found = parse("--num-ipus", "8", "--ipus-per-replica", "2", "--async-dataloader", "training.learning_rate=1e-3")
    (tmp_path / "config.yaml").write_text(found.to_yaml())
    assert resolve.load_yaml(tmp_path / "config.yaml") == found
    assert found.training.learning_rate == 0.001


@pytest.mark.parametrize("text", ["16.16", "16.32", "32.32"])
def test_a_precision_that_yaml_parses_as_a_number(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(f"training: {{precision: {text}}}\n")
    assert resolve.load_yaml(tmp_path / "c.yaml").training.precision == text
    assert parse(f"training.precision={text}").training.precision == text


def test_a_resumed_run_uses_the_config_of_its_folder(tmp_path: Path) -> None:
    first = parse("--batch-size", "16", "--optimizer", "adam", "--run-dir", str(tmp_path))
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    again = parse("--resume", str(tmp_path), "--epochs", "3")
    assert (again.training.batch_size, again.training.optimizer, again.training.epochs) == (16, "adam", 3)


def test_a_resumed_run_forgets_a_folder_that_its_data_set_does_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "config.yaml"
    folder.write_text("data: {dataset: synthetic, data_dir: /images}\n")
    assert parse("--resume", str(tmp_path)).data.data_dir is None
    assert parse("--resume", str(tmp_path), "--data-dir", "/x").data.data_dir == "/x"  # the plan rejects it
    assert parse("--resume", str(tmp_path), "--dataset", "imagefolder").data.data_dir == "/images"
    folder.write_text("task: {name: 'module:Task'}\ndata: {data_dir: /texts}\n")
    assert parse("--resume", str(tmp_path)).data.data_dir == "/texts"


def test_a_data_set_replaces_that_of_the_config_and_its_folder(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("data: {dataset: cifar10, data_dir: /images}\n")
    assert parse("--config", str(config), "--dataset", "synthetic").data.data_dir is None
    assert parse("--config", str(config), "--dataset", "cifar100").data.data_dir == "/images"
    config.write_text("data: {dataset: synthetic, data_dir: /images}\n")
    assert parse("--config", str(config)).data.data_dir == "/images"  # the plan rejects it


def test_replicas_follow_from_ipus() -> None:
    assert parse("--num-ipus", "16", "--ipus-per-replica", "2").pod.replicas == 8


@pytest.mark.parametrize(("argv", "instances"), [((), 2), (("--replicas", "3"), 1), (("--fleet", "inline"), 1)])
def test_default_number_of_instances(argv: tuple[str, ...], instances: int) -> None:
    assert parse(*argv).pod.num_instances == instances


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--batch-sice", "4"), ["--batch-sice", "--batch-size"]),
        (("training.batchsize=4",), ["training.batchsize", "training.batch_size"]),
        (
            ("--config", str(DIGITS), "training.bogus=4"),
            ["training.bogus in the command line; known: ", "training.lr_st"],
        ),
        (("pod.seed=4",), ["pod.seed", "training.seed"]),
        (("trainin.seed=4",), ["trainin", "training"]),
        (("seed",), ["'seed'", "section.key=value, as in training.batch_size=8"]),
        (("epochs=3",), ["cannot read 'epochs=3': write section.key=value; did you mean training.epochs=3?"]),
        (("batch-size=3",), ["; did you mean training.batch_size=3?"]),
        (("hidden=3",), ["section.key=value, as in training.batch_size=8"]),
        (("--epochs", "0"), ["training.epochs", "'0'", "1"]),
        (("--epochs", "9" * 20), ["training.epochs", "100000"]),
        (("--learning-rate", "inf"), ["training.learning_rate", "finite"]),
        (("--save-timeout-s", "inf"), ["run.save_timeout_s", "1000000"]),
        (("--image-size", "9" * 20), ["data.image_size", "16384"]),
        (("--precision", "8"), ["training.precision", "16.16", "32.32"]),
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
    "text", ["- 1\n", "run: {}\nrun: {}\n", "training: 3\n", "training: {seed: [}\n", "training: {seeed: 1}\n"]
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        resolve.load_yaml(file)


def test_all_unknown_keys_are_reported_at_once() -> None:
    values = {"trainig": {}, "training": {"epoch": 3, "batchsize": 2}}
    with pytest.raises(ConfigError) as error:
        resolve.from_values(values, "my.yaml")
    lines = str(error.value).split("\n  ")
    assert lines[0] == "3 mistakes"
    assert lines[1:] == [
        "unknown section 'trainig' in my.yaml; did you mean training?",
        "unknown key training.epoch in my.yaml; did you mean training.epochs?",
        "unknown key training.batchsize in my.yaml; did you mean training.batch_size?",
    ]
