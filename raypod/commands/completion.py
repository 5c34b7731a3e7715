"""`raypod completion SHELL`: the completion script of a shell, written by shtab from the parsers of all commands.

The script is static: a shell that completes starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Sequence

import shtab

from raypod.cli import FlagParser, parser_of, show, suggestion
from raypod.commands.table import COMMANDS
from raypod.errors import ConfigError
from raypod.plan.flag_help import GROUPS

_DESCRIPTION = """Print the completion script of a shell: subcommands, flags, values, files and folders.

bash: raypod completion bash > ~/.local/share/bash-completion/completions/raypod
zsh:  raypod completion zsh > FOLDER/_raypod, with a FOLDER of $fpath
fish: raypod completion fish > ~/.config/fish/completions/raypod.fish
It applies to shells that are started afterwards."""
_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "PATH", "IMAGE", "FILES", "CLUSTER_FILE")
_FOLDERS = ("FOLDER", "RUN_FOLDER", "RUNS_FOLDER", "RUN")
_LAUNCH_FILES = ("hostfile", "cluster", "import-config", "export-config")
_LAUNCH_FOLDERS = ("executable-cache-path", "run-dir")


def completion(argv: Sequence[str]) -> int:
    """Print the completion script of a shell.

    Raises:
        ConfigError: this version of shtab does not know the shell.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = FlagParser(prog="raypod completion", description=_DESCRIPTION, formatter_class=formatter)
    parser.add_argument("shell", metavar="{" + ",".join(_SHELLS) + "}", help="the shell that reads the script")
    shell = parser.parse_args(argv).shell
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
        found = _launch() if name == "launch" else parser_of(command.run)
        # The parents' help flags are copied, too.
        copy = parsers.add_parser(name, parents=[found], add_help=False, help=command.summary, prog=f"raypod {name}")
        for action in copy._actions:
            _add_values(action)
    return parser


def _launch() -> argparse.ArgumentParser:
    """Return the options of `raypod launch`, which does not parse its words with argparse."""
    from raypod.launcher import options

    parser = argparse.ArgumentParser(prog="raypod launch")
    for option in options.OPTIONS:
        if option.letter == "x":
            parser.add_argument("-x", metavar="VAR", help=option.help)
            continue
        names = [f"--{option.name}", *([f"-{option.letter}"] if option.letter else [])]
        metavar = "{yes,no}" if option.kind == options.YES_NO else option.kind
        if option.name in _LAUNCH_FILES or option.name in _LAUNCH_FOLDERS:
            metavar = "FILE" if option.name in _LAUNCH_FILES else "FOLDER"
        elif option.name == "device":
            metavar = "{auto,ipu,emulated}"
        parser.add_argument(*names, metavar=metavar, help=option.help.replace("%", "%%"))
    parser.add_argument("program", metavar="FILE", nargs="*", help="the program and its arguments")
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
