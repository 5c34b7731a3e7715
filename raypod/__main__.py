"""`raypod COMMAND`, also as `python -m raypod COMMAND`.

A command is imported when it runs, so that the light ones start fast.
"""

from __future__ import annotations

import sys
from typing import List, Optional, Sequence, TextIO

from raypod.cli.table import COMMANDS, EXAMPLES, GROUPS
from raypod.errors import ConfigError
from raypod.system.command_line import paint, report_errors, show, suggestion

_WIDTH = 13  # of the names of commands


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return report_errors(lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        stream = sys.stdout if words else sys.stderr
        show(_usage(stream), stream)
        return 0 if words else 2
    name = "version" if words[0] == "--version" else words[0]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name}{suggestion(name, COMMANDS)}; raypod --help describes them")
    return COMMANDS[name].run(words[1:])


def _usage(stream: TextIO) -> str:
    lines: List[str] = [
        "usage: raypod COMMAND [flags]",
        "",
        "Train PyTorch models with Ray on Graphcore IPU-PODs, or on CPUs with an",
        "emulation of the SDK.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", paint(f"{group}:", "bold", stream)]
        lines += [f"  {name.ljust(_WIDTH)}{command.summary}" for name, command in commands.items()]
    width = max(map(len, EXAMPLES)) + 2
    lines += [
        "",
        paint("Examples:", "bold", stream),
        *(f"  {example.ljust(width)}{what}" for example, what in EXAMPLES.items()),
    ]
    lines += ["", "raypod COMMAND --help describes a command."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
