"""The command line of a training: defaults < YAML (`--config`) < flags and `section.key=value`.

A flag is the key with dashes (`--batch-size` sets `training.batch_size`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, NoReturn, Optional, Sequence, get_args

import yaml

from raypod.checkpoint.manifest import run_folder_of
from raypod.config import Config, InstancesOf, check_keys, fields, from_values, read_yaml
from raypod.errors import ConfigError
from raypod.suggestions import nearest

_ALIASES = {"replicas": ["--num-replicas"], "image_size": ["--resize"]}


class FlagParser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors: one line instead of a page of usage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.replace('argument ', '', 1)} ({self.prog} --help lists all flags)")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`--config`, a flag for every key, and `section.key=value`."""
    parser.add_argument("--config", metavar="FILE", help="YAML with the sections data, training, pod, run")
    for section, key, field in fields():
        names = ["--" + key.replace("_", "-"), *_ALIASES.get(key, [])]
        choices = get_args(field.annotation) if isinstance(field.default, str) else ()
        help_text = f"{field.description} [{field.default}]".replace("%", "%%")
        target = f"{section}.{key}"
        if isinstance(field.default, bool):
            parser.add_argument(*names, dest=target, action="store_true", default=None, help=help_text)
            parser.add_argument("--no-" + names[0][2:], dest=target, action="store_false", help=argparse.SUPPRESS)
        else:
            metavar = "{" + ",".join(choices) + "}" if choices else key.upper()
            parser.add_argument(*names, dest=target, metavar=metavar, help=help_text)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="any key, by its full name")


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse; an unknown flag is a ConfigError that names its nearest neighbour."""
    args, unknown = parser.parse_known_intermixed_args(list(argv))
    for word in unknown:
        known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
        raise ConfigError(f"unknown flag {word}{nearest(word.split('=')[0], known)}; --help lists all")
    return args


def resolve(args: argparse.Namespace, instances_of: Optional[InstancesOf] = None) -> Config:
    """Merge defaults < YAML < flags and `section.key=value` (the last two of equal rank; both at once must agree).

    `instances_of` says how many instances a cluster file wishes, where nobody said how many there shall be.
    """
    given: Dict[str, Any] = {}
    for section, key, _ in fields():
        value = getattr(args, f"{section}.{key}")
        if value is not None:
            given[f"{section}.{key}"] = value
    for word in args.overrides:
        name, equals, text = word.partition("=")
        if not equals or name.count(".") != 1:
            raise ConfigError(f"cannot read {word!r}: write section.key=value, as in training.batch_size=8")
        value = _parse_value(word, text)
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"{name} is given twice: {given[name]} by its flag and {value} by {word!r}")
        given[name] = value
    for name in given:
        section, _, key = name.partition(".")
        check_keys({section: {key: None}}, "the command line")
    # A run that goes on does so as it was started, unless it is told otherwise.
    resumed = run_folder_of(str(given["run.resume"])) if given.get("run.resume") else None
    own = resumed / "config.yaml" if resumed and not args.config else None
    source = str(own) if own and own.is_file() else args.config
    values = read_yaml(Path(source)) if source else {}
    if source != args.config:
        for key in ("run_dir", "resume_anyway"):
            values.get("run", {}).pop(key, None)
    for name, value in given.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    return from_values(values, source or "the command line", instances_of)


def _parse_value(word: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"cannot read the value of {word!r}") from None
