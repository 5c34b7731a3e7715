"""Ends this process from a thread, while the main thread is blocked in a library and handles no signal."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Callable, Iterator, List, NoReturn

from raypod.errors import RaypodError

_cleanups: List[Callable[[RaypodError], None]] = []


@contextlib.contextmanager
def on_abort(cleanup: Callable[[RaypodError], None]) -> Iterator[None]:
    """Within this context, `abort` calls `cleanup` with its error. It runs in another thread than the main one."""
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


def abort(error: RaypodError) -> NoReturn:
    """Run the cleanups, the last registered one first, print the error as one line, and exit with its exit code."""
    try:
        for cleanup in reversed(_cleanups):
            cleanup(error)
    finally:
        try:
            end_of_bar = "\n" if sys.stderr.isatty() else ""  # a progress bar leaves the cursor in its line
            sys.stderr.write(f"{end_of_bar}raypod: error: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(error.exit_code)
