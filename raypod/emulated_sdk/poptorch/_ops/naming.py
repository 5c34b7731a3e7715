"""`NameScope`: names for the ops of a graph, seen in profiles and debuggers (contract 2.6)."""

from __future__ import annotations

from typing import Any


class NameScope:
    """Context: the ops within are named under `name`. The emulation names no ops, so it has no effect.

    AssertionError unless the name is a string.
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"Parameter to NameScope must be a string, not {type(name).__name__}"
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Nothing to undo."""
