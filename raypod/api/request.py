"""From the arguments of `fit` to a plan: a task, a config and keyword flags."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, Mapping, Optional, Type, Union

from raypod.api import planning
from raypod.errors import ConfigError
from raypod.plan import resolve
from raypod.plan.config import Config, fields
from raypod.plan.flags import ALIASES
from raypod.plan.plan import Plan
from raypod.runs.upload import local_copies
from raypod.system.command_line import nearest
from raypod.system.emulated import activation
from raypod.training.tasks import registry

if TYPE_CHECKING:
    from raypod.training.tasks.task import Task

PathLike = Union[str, "os.PathLike[str]"]
TaskLike = Union[str, "Type[Task]", None]
ConfigLike = Union[PathLike, Config, Mapping[str, Mapping[str, Any]], None]


def plan_of(
    task: TaskLike, config: ConfigLike, cluster: Optional[PathLike], flags: Mapping[str, Any], is_dry: bool = False
) -> Plan:
    """Return the plan of a run; the arguments are those of `fit`. `is_dry` as in `planning.plan_from`.

    Raises:
        UserError: an argument, the cluster file or the data set is wrong.
    """
    with process_kept():
        given: Dict[str, Any] = {} if task is None else {"task.name": _name_of(task)}
        given.update({} if cluster is None else {"pod.cluster": os.fspath(cluster)})
        base = _base_of(config)
        resume = flags.get("resume")
        local_copies.take_resumed(None if resume is None else os.fspath(resume))
        values, _ = resolve.combine({} if resume is None else {"run.resume": os.fspath(resume)}, base)
        name = given.get("task.name") or resolve.task_of_values(values)
        schema = registry.schema_of(str(name))
        for key, value in _by_section(flags, schema).items():
            if key in given:
                raise ConfigError(f"{key.rpartition('.')[2]} is given twice, as an argument and as a flag")
            given[key] = value
        values, source = resolve.combine(given, base, schema)
        return planning.plan_from(values, source, is_dry)


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Remove the entries from `sys.path` that raypod adds within the context; the caller's own changes stay.

    The same holds for the environment variables that Ray sets when it is imported and a session starts.
    """
    before, variables = list(sys.path), set(os.environ)
    try:
        yield
    finally:
        for name in _SET_BY_RAY - variables:
            os.environ.pop(name, None)
        added = {activation.FOLDER, str(Path.cwd())} - set(before)
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def _name_of(task: Union[str, Type[Task]]) -> str:
    if isinstance(task, str):
        return task
    from raypod.training.tasks.task import Task  # only for a task that is a class

    if not isinstance(task, type) or not issubclass(task, Task):
        shown = task.__name__ if isinstance(task, type) else type(task).__name__
        hint = (
            "pass the class" if isinstance(task, Task) else 'pass a name, "module:Class" or a subclass of raypod.Task'
        )
        raise ConfigError(f"task = {shown}: {hint}")
    return registry.register(task)


def _base_of(config: ConfigLike) -> Union[str, resolve.Values, None]:
    """Return the path of a config file, or its sections."""
    if isinstance(config, Config):
        return {name: dict(section) for name, section in config.model_dump(exclude_unset=True).items()}
    if isinstance(config, Mapping):
        wrong = [name for name, section in config.items() if not isinstance(section, Mapping)]
        if wrong:
            sections = ", ".join(Config.model_fields)
            known = wrong[0] in Config.model_fields
            hint = "a section is a dict of its keys" if known else f"the keys of a config are sections: {sections}"
            raise ConfigError(f"config[{wrong[0]!r}] is no section; {hint}")
        return {str(name): {key: _plain(value) for key, value in each.items()} for name, each in config.items()}
    if config is None:
        return None
    try:
        return os.fspath(config)
    except TypeError:
        raise ConfigError(f"config = {config!r}: pass a path, a dict of sections or a raypod.Config") from None


def _by_section(flags: Mapping[str, Any], schema: resolve.Schema) -> Dict[str, Any]:
    """Return keyword flags by section.key. ConfigError for an unknown flag, with the nearest known one."""
    names = {key: f"{section}.{key}" for section, key, _ in fields(schema.options) if f"{section}.{key}" != "task.name"}
    names.update({flag[2:].replace("-", "_"): names[key] for key, flags_ in ALIASES.items() for flag in flags_})
    given: Dict[str, Any] = {}
    for flag, value in flags.items():
        if flag not in names:
            found = nearest(flag, sorted([*names, *_ARGUMENTS]))
            hint = f"did you mean {found[0]}?" if found else "raypod train --help-all lists all, here with underscores"
            raise ConfigError(f"unknown flag {flag}; {hint}")
        if value is None:
            continue  # the default, as for a flag that is not given
        if names[flag] in given:
            raise ConfigError(f"{flag} and another name of {names[flag]} are both given")
        given[names[flag]] = _plain(value)
    return given


_SET_BY_RAY = {"RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED", "PYTHONBREAKPOINT"}
_ARGUMENTS = ("task", "config", "cluster", "callbacks")


def _plain(value: Any) -> Any:
    """Return a value as a YAML file holds it: a path as text, a number of NumPy or a 0-d tensor as a Python number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) in ((), []) else value
