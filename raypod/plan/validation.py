"""Messages for values that a configuration schema rejects, in the words of the other messages."""

from __future__ import annotations

from typing import Any, Union

import pydantic

from raypod.errors import ConfigError

_TEXTS = {  # by pydantic's type of an error, with the names of its context
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
}


def config_error(error: pydantic.ValidationError, prefix: str = "") -> ConfigError:
    """Return the error to raise instead of a schema's: each key with its value and what it must be."""
    return ConfigError("; ".join(_message(detail, prefix) for detail in error.errors()))


def _message(detail: Any, prefix: str) -> str:
    name = prefix + ".".join(str(part) for part in detail["loc"])
    text = _TEXTS.get(detail["type"])
    if text is None:
        text = detail["msg"].partition("Value error, ")[2] or detail["msg"]  # pydantic's prefix for a ValueError
        text = text[:1].lower() + text[1:]
    else:
        text = text.format(**{key: _plain(value) for key, value in detail.get("ctx", {}).items()})
    return f"{name} = {detail['input']!r}: {text}"


def _plain(value: Union[float, str]) -> str:
    """Return a bound without an exponent and without a needless fraction: `1000000`, `0.5`; text as it is."""
    return f"{value:.0f}" if isinstance(value, (int, float)) and value == int(value) else f"{value}"
