"""Messages for values that a configuration schema rejects, in the words of the other messages."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping

import pydantic

from raypod.errors import ConfigError

_NUMBER, _WHOLE_NUMBER, _YES_NO = "must be a number", "must be a whole number", "must be true or false"
_TEXTS: Dict[str, Callable[[Mapping[str, Any]], str]] = {  # by pydantic's type of an error, from its context
    "greater_than": lambda context: f"must be greater than {_plain(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_plain(context['ge'])}",
    "less_than": lambda context: f"must be less than {_plain(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_plain(context['le'])}",
    "literal_error": lambda context: f"must be {context['expected']}",
    "finite_number": lambda _: "must be a finite number",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), lambda _: _WHOLE_NUMBER),
    **dict.fromkeys(("float_parsing", "float_type"), lambda _: _NUMBER),
    **dict.fromkeys(("bool_parsing", "bool_type"), lambda _: _YES_NO),
    "string_type": lambda _: "must be text",
}


def config_error(error: pydantic.ValidationError, prefix: str = "") -> ConfigError:
    """Return the error to raise instead of a schema's: each key with its value and what it must be."""
    return ConfigError("; ".join(_message(detail, prefix) for detail in error.errors()))


def _plain(number: float) -> str:
    """Return a bound without an exponent: `1000000`, `0.5`."""
    return f"{number:.0f}" if number == int(number) else f"{number}"


def _message(detail: Any, prefix: str) -> str:
    name = prefix + ".".join(str(part) for part in detail["loc"])
    describe = _TEXTS.get(detail["type"])
    if describe is not None:
        text = describe(detail.get("ctx", {}))
    else:
        own = detail["msg"].partition("Value error, ")[2]  # pydantic's prefix for a ValueError of a validator
        text = own or detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{name} = {detail['input']!r}: {text}"
