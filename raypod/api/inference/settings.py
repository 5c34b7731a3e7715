"""The settings that `evaluate` and its relatives may change, and the plan of an evaluation of a run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from raypod.api import planning
from raypod.api.inference.checkpoints import PathLike, Run, Weights, load, open_run
from raypod.errors import ConfigError
from raypod.plan import flags, ipu_options, resolve
from raypod.plan.compatibility import OF_IMAGE_FOLDERS, OF_SHARDS, check_data_folder, needs_of_data_set
from raypod.plan.config import IMAGE_FOLDERS, IMAGE_TASKS, SHARDS, Config, fields
from raypod.plan.plan import Plan, pipeline_stages
from raypod.system.command_line import suggestion
from raypod.training.tasks.registry import schema_of

DATA = (
    "data.dataset",
    "data.data_dir",
    "data.download",
    "data.cache_dir",
    "data.cache_size",
    "data.samples",
    "data.image",
    "data.classes",
    "data.max_image_pixels",
    "data.leave_out",
)
EVALUATION = (
    *DATA,
    *("data.num_workers", "data.image_size", "data.eight_bit_io"),
    *("training.batch_size", "training.evaluation_iterations", "training.precision", "training.execution"),
    *("training.pipeline_splits", "training.pipeline_balance", "training.layers_per_ipu"),
    *("pod.replicas", "pod.num_instances", "pod.ipus_per_replica", "pod.num_ipus", "pod.threads_per_replica"),
    *("pod.bind_cores", "pod.cluster", "pod.wait_hosts", "pod.executable_cache_path"),
    *("run.device", "run.fleet", "run.collectives", "run.strict"),
    *("run.start_timeout_s", "run.report_timeout_s", "run.stop_timeout_s", "run.silent_after_s", "run.stuck_after_s"),
)
_OF_RUN = tuple(name.partition(".")[2] for name in EVALUATION if name.startswith("run."))
# The keys of the section `training` with which a network computes; the others are those of a training.
_OF_NETWORK = (
    *("model", "stem", "norm", "precision", "batch_size", "execution", "pipeline_splits", "pipeline_balance"),
    *("layers_per_ipu", "evaluation_iterations", "seed"),
)


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str], overrides: bool = True) -> None:
    """Add the flags of keys, and with `overrides` `section.key=value`. Their defaults are the values of the run."""
    for section, key, field in fields():
        if f"{section}.{key}" in names:
            flags.add_flag(parser, section, key, field, "as the run")
    if not overrides:
        parser.set_defaults(overrides=())
        return
    what = "any of these, and task.key=value"  # with a default, argparse does not call it required
    parser.add_argument("overrides", nargs="*", default=(), metavar="section.key=value", help=what)


def given(args: argparse.Namespace, names: Sequence[str]) -> Dict[str, Any]:
    """Return the values of flags and overrides by section.key. ConfigError for any other key."""
    values = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    resolve.add_overrides(values, args.overrides)
    return values


def by_name(config: Config, keywords: Mapping[str, Any]) -> Dict[str, Any]:
    """Return keyword flags, named as on the command line with underscores, by section.key."""
    options = schema_of(config.task.name).options
    known = {key: f"{section}.{key}" for section, key, _ in fields(options)}
    for key in keywords:
        if key not in known:
            raise ConfigError(f"unknown setting {key!r}{suggestion(key, known)}")
    return {known[key]: value for key, value in keywords.items()}


def trusted_of(keywords: Dict[str, Any]) -> Sequence[str]:
    """Remove `trust` from keyword flags, and return the names of code that they contain."""
    trust = keywords.pop("trust", ())
    return [trust] if isinstance(trust, str) else list(trust)


def opened(
    where: PathLike, checkpoint: Optional[str], ema: Optional[bool], keywords: Mapping[str, Any]
) -> Tuple[Run, Weights, Dict[str, Any]]:
    """Return a run, the weights of one of its checkpoints, and keyword flags by section.key.

    Raises:
        ConfigError: as `checkpoints.open_run`, `checkpoints.load` and `by_name`.
    """
    changed_keys = {**keywords}
    trusted = trusted_of(changed_keys)
    run = open_run(where, trusted)
    changes = by_name(run.config, changed_keys)
    return run, load(run, checkpoint, ema), changes


def changed(config: Config, changes: Mapping[str, Any], allowed: Sequence[str]) -> resolve.Values:
    """Return the values of a config with some changed.

    Raises:
        ConfigError: a change is none of `allowed`, nor an option of the task.
    """
    values: resolve.Values = config.model_dump(mode="json")
    if "data.dataset" in changes:
        values["data"].pop("leave_out", None)  # numbers of the run's own samples
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if name not in allowed and (section != "task" or key == "name"):
            raise ConfigError(f"{name} cannot be changed here{suggestion(name, allowed)}")
        values.setdefault(section, {})[key] = value
    values["data"].pop("bounding_boxes")  # of training images: their file is not needed here
    values["data"].pop("shuffle_window")  # only a training has an order; other data may have no shards
    if values["data"]["dataset"] not in IMAGE_FOLDERS:
        for key in (*OF_IMAGE_FOLDERS, "rand_augment_ops", "rand_augment_magnitude"):
            values["data"].pop(key, None)
    is_image_task, dataset = resolve.task_of_values(values) in IMAGE_TASKS, values["data"]["dataset"]
    for key, (has_effect, _) in needs_of_data_set(dataset).items():
        if not has_effect and f"data.{key}" not in changes:
            values["data"].pop(key, None)
    if is_image_task and dataset not in (*IMAGE_FOLDERS, SHARDS):
        for key in OF_SHARDS:
            values["data"].pop(key, None)
    resolve.drop_unread_folder(values, changes)
    return values


def config_of(values: resolve.Values, source: str) -> Config:
    """Return the config of values. ConfigError as `resolve.from_values`."""
    return resolve.from_values(values, source, schema=schema_of(resolve.task_of_values(values)))


def check_writable(path: Path, flag: str = "--output") -> None:
    """Raise ConfigError if a file cannot be created: its folder does not exist, or it is a folder."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"{flag} {path}: {reason}")
    if not os.access(str(path.parent), os.W_OK):
        raise ConfigError(f"{flag} {path}: the folder {path.parent} is not writable")


def host_config(run: Run, changes: Mapping[str, Any]) -> Config:
    """Return the config of a run whose network runs in this process, with other data."""
    config = config_of(changed(run.config, changes, DATA), str(run.folder))
    check_data_folder(config)
    return config


def plan_of(config: Config, changes: Mapping[str, Any], source: str) -> Plan:
    """Return the plan of an evaluation of a run's weights.

    Args:
        config: of the run.
        changes: settings that replace those of the run, by section.key; they are among `EVALUATION`, or the task's.
        source: where the config comes from, for messages.

    Raises:
        UserError: a setting, or the data set, cannot be used.
    """
    values = changed(config, changes, EVALUATION)
    values["pod"].pop("min_hosts", None)  # of the training
    pod, run, training = values["pod"], values["run"], values["training"]
    if "pod.num_instances" in changes and "run.fleet" not in changes and run["fleet"] == "inline":
        run["fleet"] = "auto"
    if {"pod.replicas", "pod.num_ipus", "pod.cluster"} & set(changes) or "run.fleet" in changes:
        # What follows from the changed one must not be that of the run.
        for name in ("pod.num_instances", "pod.num_ipus"):
            if name not in changes:
                pod.pop(name.partition(".")[2], None)
        if "pod.num_ipus" in changes and "pod.replicas" not in changes:
            pod.pop("replicas", None)
    values["run"] = {key: run[key] for key in _OF_RUN}
    values["training"] = {key: training[key] for key in _OF_NETWORK}
    values["ipu"] = {key: values["ipu"][key] for key in ipu_options.OF_EVALUATION}
    # A plan checks the sizes of a training, too: this is its smallest one.
    config = config_of(values, source)
    stages = pipeline_stages(config)
    if not config.training.pipeline_splits:
        stages += stages - 1  # those that are found may return to each IPU
    values["training"]["gradient_accumulation"] = 2 * stages - 1
    plan = planning.plan_from(values, source)
    planning.check_host(plan)
    if not plan.dataset_size.test_samples:
        raise ConfigError(f"{plan.task.data} has no test split to evaluate")
    return plan
