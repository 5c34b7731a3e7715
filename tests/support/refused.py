"""Calls that must be refused."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest

from raypod.errors import ConfigError


def rejects(error: Any, message: str, call: Callable[..., Any], *given: Any, **options: Any) -> str:
    """Return the text of the error that a call raises, in which this regular expression is found."""
    with pytest.raises(error, match=message) as raised:
        call(*given, **options)
    return str(raised.value)


def refused(message: str, call: Callable[..., Any], *given: Any, **options: Any) -> str:
    """Return the text of the ConfigError that a call raises, as `rejects`."""
    return rejects(ConfigError, message, call, *given, **options)


def one_line(capsys: Any, command: Callable[[List[str]], int], words: List[str]) -> str:
    """Run a command that ends with exit code 2 and one line on standard error, and return the line."""
    capsys.readouterr()
    assert command(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)
