"""Tasks by name: the options and the facts that planning needs, and the task that instances compute.

The built-in tasks are planned without torch. A task of the user is `module:Class`; `register` names a class that cannot
be imported, because a script or a notebook defines it.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Callable, Collection, Dict, NamedTuple, Sequence, Tuple, Type

import cloudpickle  # type: ignore[import-untyped]

from raypod.errors import ConfigError
from raypod.plan import flags, resolve, stored_code, user_code
from raypod.plan.compatibility import IMAGE_KEYS, SHARD_KEYS
from raypod.plan.config import (
    HF_CAUSAL_LM,
    HF_IMAGES,
    HF_MASKED_LM,
    HF_SEQUENCES,
    HF_TOKENS,
    IMAGE_CLASSIFICATION,
    LANGUAGE_MODEL,
    Config,
    TaskOptions,
)
from raypod.plan.plan import Plan, TaskFacts
from raypod.system import sdk, torchvision_import
from raypod.system.command_line import suggestion
from raypod.training.tasks import hf_facts, image_facts, language_facts
from raypod.training.tasks.task import Task


class _Entry(NamedTuple):
    """A built-in task."""

    facts: Callable[[Config, bool], TaskFacts]  # of a config, and whether its plan is only printed
    module: str  # of the task's class; imports torch
    name: str  # of the class
    options: Type[TaskOptions] = TaskOptions
    defaults: Dict[str, Any] = {}  # of keys outside the section `task`, by section.key
    keys: Tuple[str, ...] = ()  # of the other sections; other tasks do not have them


def _hf(
    facts: Callable[[Config, bool], TaskFacts], name: str, options: Type[TaskOptions], keys: Tuple[str, ...] = ()
) -> _Entry:
    """Return a task for text of transformers."""
    return _Entry(facts, "raypod.training.tasks.hf_tasks", name, options, hf_facts.DEFAULTS, ("training.model", *keys))


_BY_NAME: Dict[str, _Entry] = {
    IMAGE_CLASSIFICATION: _Entry(
        image_facts.facts, "raypod.training.tasks.image_classification", "ImageClassification", keys=IMAGE_KEYS
    ),
    LANGUAGE_MODEL: _Entry(
        language_facts.facts,
        "raypod.training.tasks.language_model",
        "LanguageModel",
        language_facts.LanguageOptions,
        language_facts.DEFAULTS,
        SHARD_KEYS,
    ),
    HF_CAUSAL_LM: _hf(hf_facts.window_facts, "HfCausalLm", hf_facts.WindowOptions, SHARD_KEYS),
    HF_MASKED_LM: _hf(hf_facts.window_facts, "HfMaskedLm", hf_facts.MaskedOptions, SHARD_KEYS),
    HF_SEQUENCES: _hf(hf_facts.labelled_facts, "HfSequenceClassification", hf_facts.LabelledOptions),
    HF_TOKENS: _hf(hf_facts.labelled_facts, "HfTokenClassification", hf_facts.LabelledOptions),
    HF_IMAGES: _Entry(
        image_facts.facts,
        "raypod.training.tasks.hf_tasks",
        "HfImageClassification",
        hf_facts.ImageOptions,
        hf_facts.DEFAULTS,
        IMAGE_KEYS,
    ),
}
_registered: Dict[str, Type[Task]] = {}


def register(task: Type[Task]) -> str:
    """Return the name of a task's class, `module:Class`, with which configs of this process find it."""
    name = f"{task.__module__}:{task.__qualname__}"
    _registered[name] = task
    return name


def schema_for(argv: Sequence[str]) -> resolve.Schema:
    """Return what the task of a command line adds to the config. ConfigError as `schema_of`."""
    return schema_of(resolve.task_name(argv))


def schema_of(name: str) -> resolve.Schema:
    """Return what a task adds to the config.

    Raises:
        ConfigError: there is no such task, it cannot be imported, or as `flags.check_options`.
    """
    if name in _BY_NAME:
        return resolve.Schema(_BY_NAME[name].options, _BY_NAME[name].defaults)
    task = _user_class(name)
    flags.check_options(name, task.Options)
    return resolve.Schema(task.Options, task.defaults, scales_rate=False)


def load_config(path: Path, trusted: Collection[str] = ()) -> Config:
    """Return the Config of a run folder's `config.yaml`; `trusted` are names of code that the user has named.

    Raises:
        ConfigError: it cannot be used, or as `stored_code.check`.
    """
    values = resolve.read_yaml(path)
    stored_code.check(values, path, trusted, "--trust")
    return resolve.from_values(values, str(path), schema=schema_of(resolve.task_of_values(values)))


def facts_of(config: Config, is_dry: bool = False) -> TaskFacts:
    """Return what planning has to know of a config's task.

    Args:
        is_dry: whether the plan is only printed: then nothing is downloaded, and if files of the data set are missing,
            its published size counts, where there is one.

    Raises:
        ConfigError: the data set cannot be used, or a key is one of another task.
    """
    name = config.task.name
    _check_keys(config)
    if name in _BY_NAME:
        return _BY_NAME[name].facts(config, is_dry)
    kind = _user_class(name)
    with _importable(config.run.device), user_code.reported(name):
        facts = kind(config).facts()
    cannot_import = kind.__module__ == "__main__" or "<locals>" in kind.__qualname__
    return dataclasses.replace(facts, pickled=cloudpickle.dumps(kind)) if cannot_import else facts


def task_of(config: Config, pickled: bytes = b"") -> Task:
    """Return a config's task. Imports torch.

    Args:
        pickled: `TaskFacts.pickled`, in another process than that of `register`.
    """
    if pickled and config.task.name not in _registered:
        _registered[config.task.name] = cloudpickle.loads(pickled)
    return kind_of(config)(config)


def kind_of(config: Config) -> Type[Task]:
    """Return the class of a config's task. Imports torch."""
    entry = _BY_NAME.get(config.task.name)
    if entry is None:
        return _user_class(config.task.name)
    kind: Type[Task] = getattr(importlib.import_module(entry.module), entry.name)
    return kind


def task_of_plan(plan: Plan) -> Task:
    """Return the task of a plan. Imports torch."""
    return task_of(plan.config, plan.task.pickled)


def _check_keys(config: Config) -> None:
    """Raise ConfigError for a key of another built-in task that has not its default."""
    default, own = Config(), _BY_NAME.get(config.task.name)
    for entry in _BY_NAME.values():
        for key in entry.keys:
            if key in (SHARD_KEYS if own is None else own.keys):
                continue
            section, _, field = key.partition(".")
            if getattr(getattr(config, section), field) != getattr(getattr(default, section), field):
                raise ConfigError(f"--{field.replace('_', '-')} has no effect on the task {config.task.name}: omit it")


def _user_class(name: str) -> Type[Task]:
    if name in _registered:
        return _registered[name]
    if ":" not in name:
        hint = suggestion(name, [*_BY_NAME, "module:Class"])
        raise ConfigError(f"unknown task {name!r}{hint}")
    if name.startswith("__main__:"):
        raise ConfigError(f"the task {name} is defined by a script: run that script, or move the class to a module")
    with _importable("auto"):
        found = user_code.import_name(name, "task.name")
    if not isinstance(found, type) or not issubclass(found, Task):
        raise ConfigError(f"task.name = {name!r} is no subclass of raypod.Task")
    return found


def _importable(device: str) -> Any:
    torchvision_import.install()  # the user's module may import torchvision
    return sdk.importable(device)
