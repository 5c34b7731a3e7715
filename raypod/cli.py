"""The border between a command and the shell: errors become one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any, Iterable, NoReturn

from raypod.errors import ConfigError, RaypodError

INTERRUPTED = 130


def report_errors(command: Any) -> int:
    """Run a command; an error of raypod's own is one line on stderr and its exit code."""
    try:
        return int(command())
    except RaypodError as error:
        print(f"raypod: error: {error}", file=sys.stderr)  # noqa: T201 - the command line's own output
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("raypod: interrupted", file=sys.stderr)  # noqa: T201
        return int(getattr(interrupt, "exit_code", INTERRUPTED))


# --- from suggestions: What somebody may have meant who wrote a name that is not known.


def nearest(word: str, known_names: Iterable[str]) -> str:
    """The end of a complaint about `word`, a name or section.key: the one that was meant, else all that are known."""
    known = list(known_names)
    section, _, key = word.partition(".")
    found = [name for name in known if key and name.partition(".")[2] == key]  # the right key in the wrong section
    if key:
        known = [name for name in known if name.startswith(f"{section}.")]
        keys = difflib.get_close_matches(key, [name.partition(".")[2] for name in known], n=1, cutoff=0.5)
        found = found or [f"{section}.{each}" for each in keys]
    else:
        found = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(sorted(known))}"


class FlagParser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors: one line instead of a page of usage."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.replace('argument ', '', 1)} ({self.prog} --help lists all flags)")
