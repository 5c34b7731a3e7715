"""Patterns that select names of parameters, as in `head.*`. Needs no torch."""

from __future__ import annotations

import fnmatch
from typing import List, Sequence

from raypod.cli import nearest
from raypod.errors import ConfigError


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a name or one of its modules: `layer1` and `layer?` match `layer1.0.weight`."""
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(prefix, pattern) for pattern in patterns for prefix in prefixes)


def check_all_match(flag: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for the first pattern that matches no name; the message has names that are similar."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            modules = [name.rpartition(".")[0] for name in names]
            similar = nearest(pattern, dict.fromkeys([*names, *filter(None, modules)]), 3) or _first(names)
            raise ConfigError(f"{flag} {pattern} matches no name of the network; there are {', '.join(similar)}")


def _first(names: Sequence[str], count: int = 5) -> List[str]:
    return [*names[:count], "..."] if len(names) > count else list(names)
