"""`raypod completion SHELL`: the completion script of a shell, written by shtab from the parsers of all commands.

The script is static: a shell that completes starts no Python.
"""

from __future__ import annotations

import argparse

import shtab

from raypod.cli.table import COMMANDS
from raypod.errors import ConfigError
from raypod.plan.flags import GROUPS
from raypod.system.command_line import FlagParser, show, suggestion

_DESCRIPTION = """Print the completion script of a shell: subcommands, flags, values, files and folders.

bash: raypod completion bash > ~/.local/share/bash-completion/completions/raypod
zsh:  raypod completion zsh > FOLDER/_raypod, with a FOLDER of $fpath
fish: raypod completion fish > ~/.config/fish/completions/raypod.fish
It applies to shells that are started afterwards."""
_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "PATH", "IMAGE", "FILES", "CLUSTER_FILE")
_FOLDERS = ("FOLDER", "RUN_FOLDER", "RUNS_FOLDER", "RUN")


def parser() -> FlagParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = FlagParser(run, prog="raypod completion", description=_DESCRIPTION, formatter_class=formatter)
    parser.add_argument("shell", metavar="{" + ",".join(_SHELLS) + "}", help="the shell that reads the script")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the completion script of a shell.

    Raises:
        ConfigError: this version of shtab does not know the shell.
    """
    shell = args.shell
    if shell not in _SHELLS:
        raise ConfigError(f"completion {shell}: no such shell{suggestion(shell, _SHELLS)}")
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ConfigError(
            f"completion {shell} needs a newer shtab, which needs Python 3.9 or later: pip install -U shtab"
        )
    show(shtab.complete(_whole_parser(), shell=shell))
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands."""
    parser = argparse.ArgumentParser(prog="raypod")
    parser.add_argument("--version", action="store_true", help="print the versions of raypod and of what it uses")
    parsers = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        # The parents' help flags are copied, too.
        parents = [command.parser()]
        copy = parsers.add_parser(name, parents=parents, add_help=False, help=command.summary, prog=f"raypod {name}")
        for action in copy._actions:
            _add_values(action)
    return parser


def _add_values(action: argparse.Action) -> None:
    """Let a shell complete the values of a flag: its choices, files or folders."""
    metavar = action.metavar
    if action.nargs == 0 or not (isinstance(metavar, str) or "--help" in action.option_strings):
        return
    if "--help" in action.option_strings:
        action.choices = tuple(GROUPS)
    elif isinstance(metavar, str) and metavar.startswith("{"):
        action.choices = tuple(metavar[1:-1].split(","))
    elif metavar in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
