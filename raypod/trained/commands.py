"""The commands `raypod evaluate`, `export`, `average` and `predict`: their flags and their output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict, Sequence

from raypod.cli import FlagParser
from raypod.errors import ConfigError
from raypod.host.files import replace_file, strict_json
from raypod.plan.plan import Plan
from raypod.plan.resolve import parse_arguments
from raypod.trained import checkpoints, settings

_CHECKPOINT = (
    "last, best, the name or update of a checkpoint of the run, or the path of a checkpoint or safetensors file"
)


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a checkpoint of a run."""
    from raypod.trained.evaluate import evaluate_run  # as below: the flags of each command work without the others

    parser = _parser("evaluate", "Evaluate a checkpoint of a run on its test split, or on another data set.")
    _add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the result to this JSON file")
    args = _parsed(parser, argv, settings.EVALUATION)
    output = writable(args.output) if args.output else None
    run = checkpoints.open_run(args.run)
    found, plan = evaluate_run(run, args.checkpoint, settings.given(args, settings.EVALUATION))
    text = strict_json(found, indent=2)
    print(text if args.json else f"{_checkpoint_line(found)}\n{measured_line(plan, found)}")  # noqa: T201
    if output is not None:
        replace_file(output, f"{text}\n".encode())
    return 0


def measured_line(plan: Plan, found: Dict[str, Any]) -> str:
    """Return the metrics of an evaluation in one line."""
    values = ", ".join(f"{metric.name} {metric.text(found[metric.name])}" for metric in plan.task.metrics)
    return f"{values} ({found['samples']} {plan.task.samples_are} of {plan.task.data}, {found['device']})"


def writable(name: str) -> Path:
    """Return the path of a file to write. ConfigError if its folder does not exist, or it is a folder."""
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"--output {name}: {reason}")
    return path


def _checkpoint_line(found: Dict[str, Any]) -> str:
    update = "" if found["update"] is None else f" (update {found['update']})"
    return f"{found['checkpoint']}{update}"


def _parser(verb: str, description: str) -> FlagParser:
    parser = FlagParser(prog=f"raypod {verb}", description=description)
    parser.add_argument("run", metavar="RUN", help="run folder, or a checkpoint in it")
    return parser


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="NAME", help=f"{_CHECKPOINT} [last]")


def _parsed(parser: FlagParser, argv: Sequence[str], names: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose flags include those of the keys `names`."""
    settings.add_flags(parser, names)
    return parse_arguments(parser, argv)
