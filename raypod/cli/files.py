"""`raypod files`: the recipes and cluster files that raypod contains."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import List

from raypod.errors import ConfigError
from raypod.plan import shipped
from raypod.system.command_line import FlagParser, format_table, show, suggestion, width_of

_TITLES = {shipped.RECIPES: "Recipes, for raypod train --config", shipped.CLUSTERS: "Cluster files, for --cluster"}


def parser() -> FlagParser:
    """Return the parser of the command."""
    description = "List the recipes and cluster files that raypod contains, or print one of them."
    parser = FlagParser(run, prog="raypod files", description=description)
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this file, as in: raypod files pod64.yaml")
    return parser


def run(args: Namespace) -> int:
    """List the files, or print one. ConfigError for an unknown name."""
    name = args.name
    if name is None:
        show("\n\n".join(_listed(kind) for kind in _TITLES))
        return 0
    for kind in _TITLES:
        for file in (name, f"{name}.yaml"):
            if file in shipped.names(kind):
                sys.stdout.write((shipped.folder(kind) / file).read_text(encoding="utf-8"))
                return 0
    known = [each for kind in _TITLES for each in shipped.names(kind)]
    raise ConfigError(f"files {name}: raypod contains no such file{suggestion(name, known)}")


def _listed(kind: str) -> str:
    names = shipped.names(kind)
    width = width_of(sys.stdout)
    rows: List[List[str]] = [[f"  {name}", _summary(shipped.folder(kind) / name)] for name in names]
    return "\n".join([f"{_TITLES[kind]}:", *format_table(rows, width=width)]) if rows else f"{_TITLES[kind]}: none"


def _summary(file: Path) -> str:
    """Return the beginning of a file's first comment."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").split(". ")[0].rstrip(".")
