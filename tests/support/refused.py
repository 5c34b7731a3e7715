"""Calls that must be refused."""

from __future__ import annotations

from typing import Any, Callable, List

import pytest

from raypod.errors import ConfigError


def refused(words: str, call: Callable[..., Any], *given: Any, **options: Any) -> str:
    """Return the message of the ConfigError that a call raises, and which matches."""
    with pytest.raises(ConfigError, match=words) as raised:
        call(*given, **options)
    return str(raised.value)


def one_line(capsys: Any, command: Callable[[List[str]], int], words: List[str]) -> str:
    """Run a command that ends with exit code 2 and one line on standard error, and return the line."""
    capsys.readouterr()
    assert command(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)
