"""Ends this process from a thread, while the main thread is blocked in a library and handles no signal."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Callable, Iterator, List, NoReturn, Union

from raypod.errors import Preempted, RaypodError
from raypod.system.command_line import tell

Ending = Union[RaypodError, Preempted]
_cleanups: List[Callable[[Ending], None]] = []


@contextlib.contextmanager
def on_abort(cleanup: Callable[[Ending], None]) -> Iterator[None]:
    """Within this context, `abort` calls `cleanup` with its error. It runs in another thread than the main one."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


def abort(error: Ending) -> NoReturn:
    """Run the cleanups, the last registered one first, print the error as one line, and exit with its exit code."""
    try:
        for cleanup in reversed(_cleanups):
            cleanup(error)
    finally:
        try:
            end_of_bar = "\n" if sys.stderr.isatty() else ""  # a progress bar leaves the cursor in its line
            what = "" if isinstance(error, Preempted) else "error: "
            tell(f"{end_of_bar}raypod: {what}{error}", sys.stderr)
        finally:
            os._exit(error.exit_code)
