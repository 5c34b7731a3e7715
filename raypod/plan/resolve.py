"""The command line of a training: defaults < YAML (`--config`) < flags and `section.key=value`.

A flag is the key with dashes (`--batch-size` sets `training.batch_size`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, get_args

import pydantic
import yaml

from raypod.cli import nearest, suggestion
from raypod.errors import ConfigError
from raypod.plan.config import Config, PodSection, fields

MANIFEST = "manifest.json"  # of a checkpoint folder; --resume names one or a run folder
InstancesOf = Callable[[str], int]


def load_yaml(path: Path) -> Config:
    """A Config out of a YAML file alone."""
    return from_values(read_yaml(path), source=str(path))


def from_values(
    values: Mapping[str, Mapping[str, Any]], source: str = "config", instances_of: Optional[InstancesOf] = None
) -> Config:
    """Check keys and values, settle what follows from others, and check what contradicts itself."""
    check_keys(values, source)
    try:
        return Config.model_validate(_settle(values, instances_of))
    except pydantic.ValidationError as error:
        raise ConfigError("; ".join(_tell(detail) for detail in error.errors())) from None


class _NoKeyTwice(yaml.SafeLoader):
    """YAML would take the last of equal keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """As the base, for mappings without equal keys."""
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Dict[str, Dict[str, Any]]:
    """The sections of a YAML file, each with its keys and their values, which are not checked here.

    Raises:
        ConfigError: it cannot be read, is not YAML, has a key twice, or holds something else than sections.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML, and no text: {error}") from None
    try:
        values = yaml.load(text, _NoKeyTwice)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(part or {}, dict) for part in values.values()):
        raise ConfigError(f"{path}: expected sections ({', '.join(Config.model_fields)}), each with its keys")
    return {str(section): dict(part or {}) for section, part in values.items()}


def check_keys(values: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """Raise ConfigError for an unknown section or key; the message names `source` and the nearest known name."""
    known = [f"{section}.{key}" for section, key, _ in fields()]
    for section, part in values.items():
        if section not in Config.model_fields:
            raise ConfigError(
                f"unknown section {section!r} in {source}{suggestion(section, sorted(Config.model_fields))}"
            )
        for key in part:
            name = f"{section}.{key}"
            if name in known:
                continue
            elsewhere = [other for other in known if other.partition(".")[2] == key]  # the right key, the wrong section
            keys = sorted(other.partition(".")[2] for other in known if other.startswith(f"{section}."))
            found = elsewhere or [f"{section}.{near}" for near in nearest(key, keys)]
            hint = f"; did you mean {found[0]}?" if found else f"; known: {', '.join(f'{section}.{k}' for k in keys)}"
            raise ConfigError(f"unknown key {name} in {source}{hint}")


def _settle(values: Mapping[str, Mapping[str, Any]], instances_of: Optional[InstancesOf]) -> Dict[str, Dict[str, Any]]:
    """Numbers that follow from other numbers: replicas from IPUs, and the default count of instances."""
    settled = {section: dict(part) for section, part in values.items()}
    pod = settled.setdefault("pod", {})
    per_replica = _whole_number(pod.get("ipus_per_replica", 1))
    num_ipus, replicas = _whole_number(pod.get("num_ipus")), _whole_number(pod.get("replicas"))
    if num_ipus and per_replica:
        if num_ipus % per_replica:
            raise ConfigError(f"{num_ipus} IPUs are not a multiple of {per_replica} IPUs per replica")
        if replicas and replicas * per_replica != num_ipus:
            raise ConfigError(
                f"{replicas} replicas x {per_replica} IPUs = {replicas * per_replica} IPUs, not --num-ipus {num_ipus}; "
                "give one of --replicas and --num-ipus"
            )
        pod["replicas"] = replicas = num_ipus // per_replica
    if pod.get("num_instances") is None:
        total = replicas or PodSection().replicas
        inline = settled.get("run", {}).get("fleet") == "inline"
        if instances_of is not None and pod.get("cluster") and not inline:
            pod["num_instances"] = wished = instances_of(str(pod["cluster"]))
            if replicas is None:  # the default, or the next number that leaves no instance without
                pod["replicas"] = -(-total // wished) * wished
        else:
            pod["num_instances"] = 1 if inline or total % 2 else 2
    return settled


def _whole_number(value: Any) -> Optional[int]:
    """The value as a whole number, or None where the sections' own check will refuse it."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _tell(detail: Any) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    said = detail["msg"].partition("Value error, ")[2] or detail["msg"]  # pydantic's for a validator of ours
    message = said[:1].lower() + said[1:]
    return f"{name} = {detail['input']!r}: {message}"


_ALIASES = {"replicas": ["--num-replicas"], "image_size": ["--resize"]}


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
        raise ConfigError(f"unknown flag {word}{suggestion(word.split('=')[0], sorted(known))}; --help lists all")
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


def run_folder_of(resume: str) -> Optional[Path]:
    """The run folder that `--resume` names, itself or by one of its checkpoints; None for a checkpoint elsewhere."""
    path = Path(resume).resolve()
    if not (path / MANIFEST).exists():
        return path
    return path.parent.parent if path.parent.name == "checkpoints" else None
