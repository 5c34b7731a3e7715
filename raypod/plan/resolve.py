"""Resolve a command line to a Config: defaults < YAML file (`--config`) < flags and `section.key=value`.

A flag is the key with dashes: `--batch-size` sets `training.batch_size`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

import pydantic
import yaml

from raypod.errors import ConfigError
from raypod.plan import ipu_options, shipped, stored_code
from raypod.plan.config import (
    IMAGE_CLASSIFICATION,
    IMAGE_TASKS,
    MANIFEST,
    WITHOUT_FILES,
    Config,
    DataSection,
    TaskOptions,
    TrainingSection,
    fields,
)
from raypod.plan.layout import CHECKPOINTS, CONFIG, SEAL, is_run_folder
from raypod.plan.learning_rate import DEFAULT_RATES, default_rate, rate_samples
from raypod.plan.sections import PodSection
from raypod.plan.unique_keys import DuplicateKey, UniqueKeyLoader, syntax_error
from raypod.system.command_line import counted, nearest, say, suggestion, value_of
from raypod.system.urls import is_url

Values = Dict[str, Dict[str, Any]]  # section -> key -> value as given, not validated
TASK_NAME = "task.name"
_TEXTS = {  # by pydantic's type of an error, with the names of its context
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
}


class Schema(NamedTuple):
    """The keys and defaults that a task adds to the config.

    Attributes:
        options: the class of the task's own options, keys of the section `task`.
        defaults: of other keys, by section.key.
        scales_rate: the default learning rate, in `defaults` or not, holds for the default optimizer and global batch.
            That of a task of the user is used as it is.
    """

    options: Type[TaskOptions] = TaskOptions
    defaults: Mapping[str, Any] = MappingProxyType({})
    scales_rate: bool = True  # the default learning rate follows the optimizer and the global batch


_RATE_KEYS = ("optimizer", "batch_size", "gradient_accumulation", "reduction")  # on which the default rate depends
NO_SCHEMA = Schema()  # of a task without options
remote_runs: Dict[str, Path] = {}  # local copies of remote runs, by the URL of `--resume`


def task_name(argv: Sequence[str]) -> str:
    """Return the name of a command line's task; the rest of the command line is not checked.

    Raises:
        ConfigError: the config file cannot be read.
    """
    named, config = value_of(argv, "--task", TASK_NAME) or None, value_of(argv, "--config", "--config")
    resume, run_dir = value_of(argv, "--resume", "run.resume"), value_of(argv, "--run-dir", "run.run_dir")
    source = config or _config_of_resumed(resume, run_dir)
    values = read_yaml(shipped.find(source, shipped.RECIPES)) if source else {}
    task = task_of_values(values)
    if source and named is None:
        _check_stored({"task": {"name": task}}, Path(source), config is None)
    return str(named or task)


def task_of_values(values: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the task of a config's values, which need not be valid."""
    return str(values.get("task", {}).get("name") or IMAGE_CLASSIFICATION)


def resolve(args: argparse.Namespace) -> Config:
    """Return the config of parsed flags, without the defaults that follow from a cluster file."""
    return from_values(*merge(args), schema=args.schema)


def merge(args: argparse.Namespace) -> Tuple[Values, str]:
    """Return the values of the YAML file, replaced by those of the command line, and the file's name for messages.

    Flags and overrides have the same rank; a key given by both must have the same value. With `--resume` and without
    `--config`, the file is `config.yaml` of the resumed run.

    Raises:
        ConfigError: an override or the file cannot be read, a key is unknown, or is given twice with two values.
    """
    return combine(given_values(args), args.config, args.schema)


def combine(
    given: Mapping[str, Any], config: Union[str, Values, None], schema: Schema = NO_SCHEMA
) -> Tuple[Values, str]:
    """Return the values of a config, replaced by given ones, and the name of the config for messages.

    Args:
        given: values by section.key.
        config: the path of a YAML file, or its content. None with `run.resume` among the given values: `config.yaml` of
            the resumed run.
        schema: what the task adds.

    Raises:
        ConfigError: the file cannot be read, or a given key is unknown.
    """
    for name in given:
        section, _, key = name.partition(".")
        check_keys({section: {key: None}}, "the command line", schema)
    source = config or _config_of_resumed(given.get("run.resume"), given.get("run.run_dir"))
    values = read_yaml(shipped.find(source, shipped.RECIPES)) if isinstance(source, str) else _copied(source or {})
    if source is not config:
        for key in ("run_dir", "resume_anyway"):
            values.get("run", {}).pop(key, None)
    kept = _copied(values)
    for name, value in given.items():
        section, _, key = name.partition(".")
        kept.get(section, {}).pop(key, None)
        values.setdefault(section, {})[key] = value
    if isinstance(source, str):
        _check_stored(kept, Path(source), source is not config, str(given.get("run.resume", "")))
    for line in ipu_options.expand_ipu_config(values):
        say(line)
    if source is not config or "data.dataset" in given:  # a data set that replaces another one, replaces its folder
        drop_unread_folder(values, given)
    return values, source if isinstance(source, str) else "the command line" if source is None else "config"


def drop_unread_folder(values: Values, given: Mapping[str, Any]) -> None:
    """Remove the data folder of a run whose data set, its own or a `given` one, reads none; plans reject both."""
    data = values.get("data", {})
    reads_none = data.get("dataset", DataSection().dataset) in WITHOUT_FILES
    if reads_none and task_of_values(values) in IMAGE_TASKS and "data.data_dir" not in given:
        data.pop("data_dir", None)


def _copied(values: Mapping[str, Mapping[str, Any]]) -> Values:
    return {section: dict(entries) for section, entries in values.items()}


def _config_of_resumed(resume: Optional[Any], run_dir: Optional[Any]) -> Optional[str]:
    """Return the `config.yaml` of the resumed run, if there is one.

    If the run is gone, the same command continues the one in `run_dir` that began from it: that of this one.
    """
    if not resume:
        return None
    is_gone = not is_url(str(resume)) and not Path(str(resume)).exists()
    folders = (run_folder_of(str(resume)), Path(str(run_dir)) if run_dir and is_gone else None)
    files = (str(each / CONFIG) for each in folders if each and (each / CONFIG).is_file())
    return next(files, None)


def _check_stored(values: Values, path: Path, is_resumed: bool, resume: str = "") -> None:
    """Check what the configuration of a run folder decides; ConfigError if it may not. Other files are the user's."""
    if is_resumed or (path.name == CONFIG and _is_of_run(path.parent)):
        stored_code.check(values, path)
        stored_code.check_storage(values, path, resume)
        stored_code.check_commands(values, path)


def _is_of_run(folder: Path) -> bool:
    return is_run_folder(folder) or (folder / CHECKPOINTS).exists()


def given_values(args: argparse.Namespace) -> Dict[str, Any]:
    """Return the values of flags and overrides, by section.key."""
    given: Dict[str, Any] = {}
    for section, key, _ in fields(args.schema.options):
        value = getattr(args, f"{section}.{key}")
        if value is not None:
            given[f"{section}.{key}"] = value
    add_overrides(given, args.overrides)
    return given


def add_overrides(given: Dict[str, Any], words: Sequence[str]) -> None:
    """Add the values of words `section.key=value` to those by section.key. ConfigError for another word or value."""
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name.count(".") != 1:
            full = _full_name(name) if equals else None
            hint = f"; did you mean {full}={text}?" if full else ", as in training.batch_size=8"
            raise ConfigError(f"cannot read {word!r}: write section.key=value{hint}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"cannot read the value of {word!r}") from None
        if name in given and str(given[name]) != str(value):
            raise ConfigError(f"{name} is given twice: {given[name]} by its flag and {value} by {word!r}")
        given[name] = value


def _full_name(key: str) -> Optional[str]:
    """Return section.key of a key that was written without its section or as a flag; None for another word."""
    key = key.lstrip("-").replace("-", "_")
    return next((f"{section}.{name}" for section, name, _ in fields() if name == key), None)


def from_values(
    values: Mapping[str, Mapping[str, Any]],
    source: str = "config",
    cluster_instances: Optional[int] = None,
    schema: Schema = NO_SCHEMA,
) -> Config:
    """Return the validated Config of given values.

    Args:
        values: section -> key -> value.
        source: where the values come from, for messages.
        cluster_instances: the default number of instances, if a cluster file determines it.
        schema: what the task adds.

    Raises:
        ConfigError: a section or key is unknown, a value is out of bounds, or two values contradict each other.
    """
    check_keys(values, source, schema)
    derived = _derive_counts(values, cluster_instances)
    rate = _default_rate(derived, schema)
    if rate is not None:
        derived.setdefault("training", {})["learning_rate"] = rate
    for name, value in schema.defaults.items():
        section, _, key = name.partition(".")
        derived.setdefault(section, {}).setdefault(key, value)
    task = derived.pop("task", {})
    try:
        options = schema.options.model_validate({key: value for key, value in task.items() if key != "name"})
    except pydantic.ValidationError as error:
        raise config_error(error, "task.") from None
    named = {"name": task["name"]} if task.get("name") is not None else {}
    try:
        return Config.model_validate({**derived, "task": {**named, **options.model_dump(mode="json")}})
    except pydantic.ValidationError as error:
        raise config_error(error) from None


def read_yaml(path: Path) -> Values:
    """Return the sections of a YAML file; keys and values are not validated.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has duplicate keys, or is not a mapping of sections; that of
            a run is cut off.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        others = shipped.hint(str(path), shipped.RECIPES) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}{others}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: it is not a text file ({error})") from None
    # raypod writes it with a seal, and with an end of line; who writes one by hand may omit both.
    is_cut_off = not text.strip() or (not text.endswith("\n") and (path.parent / SEAL).exists())
    if path.name == CONFIG and is_cut_off and _is_of_run(path.parent):
        raise ConfigError(f"{path} is cut off, and the settings of the run are lost: restore it from a copy of the run")
    try:
        values = yaml.load(text, UniqueKeyLoader)
    except DuplicateKey as error:
        raise ConfigError(f"{path}, line {error.line}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(syntax_error(str(path), error)) from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(each, (dict, type(None))) for each in values.values()):
        raise ConfigError(f"{path}: expected sections ({', '.join(Config.model_fields)}), each with its keys")
    sections = {str(name): section or {} for name, section in values.items()}
    return {name: {str(key): value for key, value in section.items()} for name, section in sections.items()}


def check_keys(values: Mapping[str, Mapping[str, Any]], source: str, schema: Schema = NO_SCHEMA) -> None:
    """Raise ConfigError for unknown sections and keys; the message names `source` and the nearest known names."""
    known = [f"{section}.{key}" for section, key, _ in fields(schema.options)]
    mistakes = []
    for section, entries in values.items():
        if section not in Config.model_fields:
            mistakes.append(
                f"unknown section {section!r} in {source}{suggestion(section, sorted(Config.model_fields))}"
            )
            continue
        unknown = [key for key in entries if f"{section}.{key}" not in known]
        mistakes += [
            f"unknown key {section}.{key} in {source}{_key_suggestion(section, key, known)}" for key in unknown
        ]
    if mistakes:
        raise ConfigError("\n  ".join([*([f"{len(mistakes)} mistakes"] if mistakes[1:] else []), *mistakes]))


def _key_suggestion(section: str, key: str, known: Sequence[str]) -> str:
    """Return the same key in another section, else the nearest key of the section, else all its keys."""
    elsewhere = [name for name in known if name.partition(".")[2] == key]
    keys = sorted(name.partition(".")[2] for name in known if name.startswith(f"{section}."))
    found = elsewhere or [f"{section}.{name}" for name in nearest(key, keys)]
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(f'{section}.{name}' for name in keys)}"


def _derive_counts(values: Mapping[str, Mapping[str, Any]], cluster_instances: Optional[int]) -> Values:
    """Return the values with the replicas that follow from `num_ipus`, and with the default number of instances."""
    derived = _copied(values)
    pod = derived.setdefault("pod", {})
    per_replica = _whole_number(pod.get("ipus_per_replica", 1))
    num_ipus, replicas = _whole_number(pod.get("num_ipus")), _whole_number(pod.get("replicas"))
    if num_ipus and per_replica:
        if num_ipus % per_replica:
            raise ConfigError(f"--num-ipus {num_ipus} is not a multiple of {per_replica} IPUs per replica")
        if replicas and replicas * per_replica != num_ipus:
            raise ConfigError(
                f"{counted(replicas, 'replica')} x {counted(per_replica, 'IPU')} = "
                f"{counted(replicas * per_replica, 'IPU')}, not --num-ipus {num_ipus}; give one of --replicas and "
                "--num-ipus"
            )
        pod["replicas"] = replicas = num_ipus // per_replica
    total = replicas or PodSection().replicas
    if pod.get("num_instances") is None:
        inline = derived.get("run", {}).get("fleet") == "inline"
        if cluster_instances is not None and not inline:
            pod["num_instances"] = cluster_instances
        else:
            pod["num_instances"] = 1 if inline or total % 2 else 2
    instances = _whole_number(pod["num_instances"])
    if pod.get("replicas") is None and instances and instances > 0:  # round the default up to a multiple
        pod["replicas"] = -(-total // instances) * instances
    return derived


def has_default_rate(values: Mapping[str, Mapping[str, Any]], schema: Schema) -> bool:
    """Return whether the learning rate follows from the optimizer and the global batch."""
    is_of_task = "training.learning_rate" in schema.defaults and not schema.scales_rate
    return not is_of_task and values.get("training", {}).get("learning_rate") is None


def _default_rate(values: Values, schema: Schema) -> Optional[float]:
    """Return the default learning rate; None if the values have one, or cannot be used, which validation rejects."""
    training, pod, of_task = values.get("training", {}), values["pod"], schema.defaults.get("training.learning_rate")
    if not has_default_rate(values, schema):
        return None
    usual = TrainingSection()
    found = {key: training.get(key, schema.defaults.get(f"training.{key}", getattr(usual, key))) for key in _RATE_KEYS}
    counts = [_whole_number(found[key]) for key in ("batch_size", "gradient_accumulation")]
    counts.append(_whole_number(pod.get("replicas") or PodSection().replicas))
    micro_batch, accumulation, replicas = (count or 0 for count in counts)
    optimizer = found["optimizer"]
    is_known = isinstance(optimizer, str) and optimizer in DEFAULT_RATES
    if min(micro_batch, accumulation, replicas) < 1 or not is_known:
        return None
    own = None if of_task is None else (schema.defaults.get("training.optimizer", usual.optimizer), of_task)
    samples = rate_samples(optimizer, found["reduction"], micro_batch, accumulation * replicas)
    return default_rate(optimizer, samples, own)


def _whole_number(value: Any) -> Optional[int]:
    """Return the value as an int, or None if it is not one; validation rejects it later."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def run_folder_of(resume: str) -> Optional[Path]:
    """Return the run folder of `--resume`: itself, or that of a checkpoint; None for a checkpoint elsewhere.

    That of a URL is its local copy, if there is one. A checkpoint may have been removed since, as older ones are.
    """
    if is_url(resume):
        return remote_runs.get(resume.rstrip("/"))
    path = Path(resume).resolve()
    is_removed = path.parent.name == CHECKPOINTS and path.parent.is_dir() and not path.exists()
    if not (path / MANIFEST).exists() and not is_removed:
        return path
    return path.parent.parent if path.parent.name == CHECKPOINTS else None


def config_error(error: pydantic.ValidationError, prefix: str = "") -> ConfigError:
    """Return the error to raise instead of a schema's: each key with its value and what it must be."""
    return ConfigError("; ".join(_message(detail, prefix) for detail in error.errors()))


def _message(detail: Any, prefix: str) -> str:
    name = prefix + ".".join(str(part) for part in detail["loc"])
    text = _TEXTS.get(detail["type"])
    if text is None:
        text = detail["msg"].partition("Value error, ")[2] or detail["msg"]  # pydantic's prefix for a ValueError
        text = text[:1].lower() + text[1:]
    else:
        text = text.format(**{key: _plain(value) for key, value in detail.get("ctx", {}).items()})
    return f"{name} = {detail['input']!r}: {text}"


def _plain(value: Union[float, str]) -> str:
    """Return a bound without an exponent and without a needless fraction: `1000000`, `0.5`; text as it is."""
    return f"{value:.0f}" if isinstance(value, (int, float)) and value == int(value) else f"{value}"
