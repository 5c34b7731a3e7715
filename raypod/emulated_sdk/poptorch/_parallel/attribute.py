"""`Attribute`: names for the compiler on the operations of a scope (api: `poptorch.options.Attribute`)."""

from __future__ import annotations

from typing import Any, Dict


class Attribute:
    """`with poptorch.Attribute(__outline={"layer": "embedding"}):` marks the operations inside.

    Each argument is a dictionary of strings (AssertionError otherwise). It tells the compiler which operations may be
    outlined together, and so changes no result; here the values are checked and kept only.
    """

    def __init__(self, **kwargs: Dict[str, str]) -> None:
        for name, values in kwargs.items():
            is_right = isinstance(values, dict) and all(
                isinstance(text, str) for pair in values.items() for text in pair
            )
            assert is_right, f"Attribute {name} must be a dictionary of strings, got {values!r}"
        self._attributes = kwargs

    def __enter__(self) -> None:
        """Nothing to do: see the class."""

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Nothing to do: see the class."""
