"""The flags of a command line, one for every key of a configuration, and their groups in the help."""

from __future__ import annotations

import argparse
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from typing_extensions import Literal, get_origin

from raypod.errors import ConfigError
from raypod.plan.config import Config, TaskOptions, fields
from raypod.plan.resolve import NO_SCHEMA, TASK_NAME, Schema
from raypod.system.command_line import Joined, nearest, show

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


def add_flags(parser: argparse.ArgumentParser, schema: Schema = NO_SCHEMA) -> Groups:
    """Add `--config`, a flag for every key in its group, `section.key=value` and the schema; return the groups.

    If the parser has no `--help`, add one that shows the most used flags or a group, and `--help-all`.
    """
    groups = Groups(parser)
    parser.set_defaults(schema=schema)
    sections = ", ".join(Config.model_fields)
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with the sections {sections}")
    for section, key, field in fields(schema.options):
        default = schema.defaults.get(f"{section}.{key}", field.default)
        action = add_flag(groups[group_of(section, key)], section, key, field, default)
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
    help_text = describe(field, default).replace("%", "%%")
    if _is_boolean(field):
        parser.add_argument(names[-1], dest=target, action="store_false", default=None, help=argparse.SUPPRESS)
        return parser.add_argument(*names[:-1], dest=target, action="store_true", default=None, help=help_text)
    metavar = metavar_of(key, field)
    action = _REPEATED.get(key, "store")
    return parser.add_argument(*names, dest=target, metavar=metavar, help=help_text, action=action)


def _is_boolean(field: FieldInfo) -> bool:
    return field.annotation in (bool, Optional[bool])


def _flag(name: str) -> str:
    return "--task" if name == TASK_NAME else "--" + name.partition(".")[2].replace("_", "-")


# Titles of the groups by name, in the order of the help.
GROUPS = {
    "task": "Task",
    "data": "Data",
    "model": "Model",
    "training": "Training",
    "ipu": "IPU",
    "pod": "Pod",
    "checkpoints": "Checkpoints",
    "failures": "Failure handling",
    "output": "Output",
}
# Groups of the keys that are not in the group of their section's name.
_GROUP_OF_KEY = {
    key: group
    for group, keys in {
        "model": (
            *(
                "norm_num_groups",
                "norm_eps",
                "zero_init_residual",
                "efficientnet_expand_ratio",
                "efficientnet_group_dim",
            ),
            *("vit_dropout", "vit_attention_dropout", "vit_representation_size"),
            *("model", "stem", "norm", "pipeline_splits", "pipeline_balance", "execution", "precision", "init_weights"),
            *("layers_per_ipu", "memory_format", "init_ignore", "freeze", "ema", "ema_every"),
        ),
        "pod": ("device", "fleet", "collectives", "strict"),
        "checkpoints": (
            *("resume", "resume_anyway", "checkpoint_every", "keep_checkpoints", "best_metric", "save_timeout_s"),
            *("snapshot_every", "checkpoint_copies", "max_unsaved", "save_retry_s"),
            *("storage_path", "storage_timeout_s", "keep_remote"),
        ),
        "failures": (
            *("on_nonfinite", "start_timeout_s", "report_timeout_s", "stop_timeout_s", "max_restarts", "dead_after_s"),
            *(
                "standby",
                "silent_after_s",
                "stuck_after_s",
                "read_retry_s",
                "preemption_grace_s",
                "preemption_exit_code",
                "reset_command",
                "reset_timeout_s",
                "elastic",
                "min_hosts",
            ),
        ),
    }.items()
    for key in keys
}
# What `--help` shows; the options of a task of the user belong to it, too.
_BASIC = frozenset(
    (
        *("task", "dataset", "data_dir", "num_workers", "model", "precision", "init_weights", "batch_size"),
        *("gradient_accumulation", "epochs", "updates", "optimizer", "learning_rate", "replicas", "num_instances"),
        *("cluster", "device", "run_dir", "resume", "checkpoint_every"),
    )
)
_BASIC_SWITCHES = frozenset(("--config", "--dry-run", "--detach", "--json", "--memory", "--timeout"))
_METAVARS = {
    **dict.fromkeys(("data_dir", "cache_dir", "run_dir", "executable_cache_path", "ipu_profile"), "FOLDER"),
    **dict.fromkeys(("resume", "init_weights"), "PATH"),
    **dict.fromkeys(("init_ignore", "freeze", "pipeline_splits", "resume_anyway", "trackers"), "NAMES"),
    **dict.fromkeys(("off_chip", "replicated_tensor_sharding", "recomputation_checkpoints"), "NAMES"),
    **dict.fromkeys(("engine_options", "popart", "popart_patterns"), "KEY=VALUE"),
    "available_memory_proportion": "X,...",
    "layers_per_ipu": "N,...",
    **dict.fromkeys(("best_metric", "early_stopping_metric"), "METRIC"),
    "leave_out": "SAMPLES",
    "checkpoint_every": "INTERVAL",
    "max_unsaved": "LIMIT",
    "storage_path": "URL",
    "cache_size": "SIZE",
    **dict.fromkeys(("cluster", "ipu_config", "bounding_boxes"), "FILE"),
    "name": "TASK",
    "profile": "UPDATES",
    "wait_hosts": "SECONDS",
}


def group_of(section: str, key: str) -> str:
    """Return the name of the group of a key."""
    return _GROUP_OF_KEY.get(key, "output" if section == "run" else section)


def metavar_of(key: str, field: FieldInfo) -> str:
    """Return what stands for the value in the help."""
    kind = _kind_of(field)
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if key.endswith("_s") and kind is float:
        return "SECONDS"
    return _METAVARS.get(key) or {int: "N", float: "X"}.get(kind, key.upper())


def describe(field: FieldInfo, default: Any) -> str:
    """Return the help text of a flag: its description, type, range and default."""
    facts: List[str] = []
    kind = _kind_of(field)
    if kind in (int, float):
        facts.append(" ".join(filter(None, ["integer" if kind is int else "number", _range_of(field.metadata)])))
    if kind is bool and default is not None:
        facts.append("on by default" if default else "off by default")
    elif default is not None:
        facts.append(f"default: {default}")
    text = field.description or ""
    return f"{text} [{'; '.join(facts)}]" if facts else text


class Groups:
    """The argument groups of a parser, and its flags `--help [GROUP]` and `--help-all`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """The flags of the help are those of argparse unless `parser` was created with `add_help=False`."""
        self._parser = parser
        self._groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
        self._basic: List[argparse.Action] = []
        if not parser.add_help:
            names = ", ".join(GROUPS)
            parser.usage = "%(prog)s [flags] [section.key=value ...]"
            parser.epilog = f"--help GROUP shows the flags of a group ({names}), --help-all every flag."
            parser.add_argument("-h", "--help", nargs="?", action=_Help, groups=self, help=argparse.SUPPRESS)
            parser.add_argument("--help-all", nargs=0, action=_Help, groups=self, help=argparse.SUPPRESS)

    def __getitem__(self, name: str) -> Any:
        """Return the argument group with a name."""
        return self._groups[name]

    def mark(self, action: argparse.Action, section: str, key: str) -> None:
        """Let `--help` show a flag if it is one of the most used ones, or an option of the task."""
        if section == "task" or key in _BASIC:
            self._basic.append(action)

    def text(self, name: Optional[str], is_all: bool) -> str:
        """Return the help with the most used flags, with those of the group `name`, or with all.

        Raises:
            ConfigError: there is no group with that name.
        """
        if name is not None and name not in self._groups:
            near = nearest(name, self._groups)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--help {name}: no such group (of {', '.join(self._groups)}){hint}")
        if is_all:
            return self._parser.format_help()
        if name is not None:
            return _format_only(self._parser, self._groups[name]._group_actions)
        switches = [each for each in self._parser._actions if _BASIC_SWITCHES.intersection(each.option_strings)]
        return _format_only(self._parser, [*self._basic, *switches])


class _Help(argparse.Action):
    """Prints the help and exits."""

    def __init__(self, groups: Groups, **kwargs: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self._groups = groups

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        name = values if isinstance(values, str) else None
        show(self._groups.text(name, option == "--help-all"))
        parser.exit()


def _format_only(parser: argparse.ArgumentParser, shown: Sequence[argparse.Action]) -> str:
    hidden: Dict[argparse.Action, Optional[str]] = {
        action: action.help for action in parser._actions if action not in shown
    }
    for action in hidden:
        action.help = argparse.SUPPRESS
    try:
        return parser.format_help()
    finally:
        for action, text in hidden.items():
            action.help = text


def _kind_of(field: FieldInfo) -> Any:
    """Return the type of a field without `Optional`."""
    kinds = [each for each in get_args(field.annotation) if each is not type(None)]
    is_optional = type(None) in get_args(field.annotation)
    return kinds[0] if is_optional and len(kinds) == 1 else field.annotation


def _range_of(metadata: Sequence[Any]) -> str:
    """Return the bounds of a number, as in `>= 1, < 2`. A bound that only keeps timers from overflowing is left out."""
    signs: Tuple[Tuple[Any, str, str], ...] = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
    bounds = [(sign, getattr(each, name)) for each in metadata for kind, name, sign in signs if isinstance(each, kind)]
    return ", ".join(f"{sign} {_number(value)}" for sign, value in bounds)


def _number(value: float) -> str:
    exponent = math.log2(value) if value > 0 else 0.0
    return f"2^{exponent:.0f}" if value >= 2**20 and exponent.is_integer() else f"{value:g}"
