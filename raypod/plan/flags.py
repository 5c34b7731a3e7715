"""The flags of a command line, one for every key of a configuration: `--batch-size` sets `training.batch_size`."""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional, Type

from pydantic.fields import FieldInfo

from raypod.errors import ConfigError
from raypod.plan import flag_help
from raypod.plan.config import Config, TaskOptions, fields
from raypod.plan.resolve import NO_SCHEMA, TASK_NAME, Schema
from raypod.system.command_line import Joined

ALIASES = {
    "replicas": ["--num-replicas"],
    "image_size": ["--resize"],
    "trackers": ["--tracker"],
    "engine_options": ["--engine-option"],
    "popart_patterns": ["--popart-pattern"],
}
# Keys whose flag can be given several times, and the action that collects the values.
_REPEATED: Dict[str, Any] = {
    "trackers": Joined,
    **dict.fromkeys(("engine_options", "popart", "popart_patterns"), "append"),
}
# Flags of the commands that take those of a config; the options of a task must not have their names.
_OF_COMMANDS = (
    *("--help", "--help-all", "--config", "--dry-run", "--json", "--detach", "--detach-as", "--take-over"),
    *("--lease", "--timeout", "--quiet", "--verbose"),
)


def flags_of(section: str, key: str, field: FieldInfo) -> List[str]:
    """Return the flags of a key: its own first, and that of False last, if it is a boolean."""
    names = [_flag(f"{section}.{key}"), *ALIASES.get(key, [])]
    return [*names, f"--no-{names[0][2:]}"] if _is_boolean(field) else names


def check_options(task: str, options: Type[TaskOptions]) -> None:
    """Raise ConfigError for an option without a default, or whose key or flag is another one's."""
    keys = {key: section for section, key, _ in fields()}
    flags = {flag for section, key, field in fields() for flag in flags_of(section, key, field)} | {*_OF_COMMANDS}
    for key, field in options.model_fields.items():
        if field.is_required():
            raise ConfigError(f"task {task}: its option {key} has no default")
        if key in keys:
            raise ConfigError(f"task {task}: its option {key} is a key of the section {keys[key]}; rename it")
        own = flags_of("task", key, field)
        taken = next((flag for flag in own if flag in flags), None)
        if taken is not None:
            raise ConfigError(f"task {task}: the flag {taken} of its option {key} exists already; rename it")
        flags.update(own)


def add_flags(parser: argparse.ArgumentParser, schema: Schema = NO_SCHEMA) -> flag_help.Groups:
    """Add `--config`, a flag for every key in its group, `section.key=value` and the schema; return the groups.

    If the parser has no `--help`, add one that shows the most used flags or a group, and `--help-all`.
    """
    groups = flag_help.Groups(parser)
    parser.set_defaults(schema=schema)
    sections = ", ".join(Config.model_fields)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with the sections {sections}")
    for section, key, field in fields(schema.options):
        default = schema.defaults.get(f"{section}.{key}", field.default)
        action = add_flag(groups[flag_help.group_of(section, key)], section, key, field, default)
        groups.mark(action, section, key)
    # With a default, argparse does not call it required.
    parser.add_argument(
        "overrides", nargs="*", default=(), metavar="section.key=value", help="any key, by its full name"
    )
    return groups


def add_flag(
    parser: argparse._ActionsContainer, section: str, key: str, field: FieldInfo, default: Any
) -> argparse.Action:
    """Add the flag of a key, with its help text; return its action."""
    target = f"{section}.{key}"
    names = flags_of(section, key, field)
    help_text = flag_help.describe(field, default).replace("%", "%%")
    if _is_boolean(field):
        parser.add_argument(names[-1], dest=target, action="store_false", default=None, help=argparse.SUPPRESS)
        return parser.add_argument(*names[:-1], dest=target, action="store_true", default=None, help=help_text)
    metavar = flag_help.metavar_of(key, field)
    action = _REPEATED.get(key, "store")
    return parser.add_argument(*names, dest=target, metavar=metavar, help=help_text, action=action)


def _is_boolean(field: FieldInfo) -> bool:
    return field.annotation in (bool, Optional[bool])


def _flag(name: str) -> str:
    return "--task" if name == TASK_NAME else "--" + name.partition(".")[2].replace("_", "-")
