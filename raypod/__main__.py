"""`python -m raypod VERB`: what can be asked about a run besides running it."""

from __future__ import annotations

import json
import sys
from typing import Callable, Dict, Optional, Sequence

from raypod.errors import ConfigError
from raypod.shell import report_errors
from raypod.train import described, drawn, plan_of


def main(argv: Optional[Sequence[str]] = None) -> int:
    """The command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    return report_errors(lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> int:
    usage = f"usage: python -m raypod {{{','.join(VERBS)}}} [flags]; `python -m raypod.train` trains"
    if not words or words[0] in ("-h", "--help"):
        print(usage)  # noqa: T201 - the command line's own output
        return 0 if words else 2
    if words[0] not in VERBS:
        raise ConfigError(f"unknown verb {words[0]!r}; {usage}")
    return VERBS[words[0]](words[1:])


def _plan(argv: Sequence[str]) -> int:
    """Print the plan of a command line of `raypod.train`: as a table, or as JSON."""
    plan, args = plan_of(argv, "raypod plan", ["--json"])
    print(json.dumps(described(plan), indent=2) if args.json else drawn(plan))  # noqa: T201
    return 0


VERBS: Dict[str, Callable[[Sequence[str]], int]] = {"plan": _plan}

if __name__ == "__main__":
    sys.exit(main())
