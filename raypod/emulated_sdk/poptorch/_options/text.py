"""Options out of text: the JSON of `POPTORCH_DEFAULT_OPTIONS` and options files (contract 1.1)."""

from __future__ import annotations

import enum
import functools
import importlib
import json
from pathlib import Path
from typing import Any, Dict

import torch

from poptorch import enums
from poptorch._errors import ConfigFileError

from .base import OptionsDict


def apply_json(options: OptionsDict, text: str) -> None:
    """Call the setters that a JSON object names: {"Training.gradientAccumulation": 4}.

    A value is the argument or the list of arguments; strings like "OutputMode.Sum" become members.
    AttributeError names a setter that does not exist.
    """
    for dotted_name, value in json.loads(text).items():
        setter = functools.reduce(getattr, dotted_name.split("."), options)
        arguments = value if isinstance(value, list) else [value]
        setter(*map(_enum_member, arguments))


def apply_file(options: OptionsDict, path: str) -> None:
    """Evaluate `options.<line>` for each line; blank lines and lines with # are skipped.

    ConfigFileError names the file, the line and what is wrong with it.
    """
    # Only when it is called, for poptorch imports this module.
    poptorch = importlib.import_module("poptorch")
    names: Dict[str, Any] = {"options": options, "torch": torch, "poptorch": poptorch, **_enumerations()}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        setter = line.strip()
        if not setter or setter.startswith("#"):
            continue
        try:
            # An options file is part of the program: the contract has its lines evaluated as Python.
            eval(f"options.{setter}", {"__builtins__": {}}, names)
        except (SyntaxError, AttributeError, NameError, TypeError, ValueError, AssertionError) as error:
            raise ConfigFileError(f"{path}, line {number}: {setter!r} cannot be applied: {error}") from error


def _enumerations() -> Dict[str, Any]:
    return {name: value for name, value in vars(enums).items() if isinstance(value, enum.EnumMeta)}


def _enum_member(value: Any) -> Any:
    """The member that a string like "OutputMode.Sum" names; everything else as it is."""
    if not isinstance(value, str):
        return value
    enumeration, _, member = value.rpartition(".")
    found = _enumerations().get(enumeration)
    return found[member] if found is not None and member in found.__members__ else value
