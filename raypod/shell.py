"""The border between a command and the shell: errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

from raypod.errors import RaypodError

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
