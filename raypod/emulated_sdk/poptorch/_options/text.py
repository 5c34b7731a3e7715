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
from poptorch._options.base import OptionsDict


def apply_json(options: OptionsDict, text: str) -> None:
    """Call the setters that a JSON object names: {"Training.gradientAccumulation": 4}.

    A value is the argument or the list of arguments; strings like "OutputMode.Sum" become members.
    AttributeError names a setter that does not exist.
    """
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError(f"Options in JSON are an object as {{'Training.gradientAccumulation': 4}}, got {text}")
    for dotted_name, value in settings.items():
        setter = functools.reduce(getattr, dotted_name.split("."), options)
        if not callable(setter):
            raise AttributeError(f"{dotted_name} is the value of an option: name its setter, as deviceIterations")
        arguments = value if isinstance(value, list) else [value]
        setter(*map(_named_value, arguments))


def apply_file(options: OptionsDict, path: str) -> None:
    """Evaluate `options.<line>` for each line; blank lines and lines with # are skipped.

    ConfigFileError names the file, the line and what is wrong with it.
    """
    # Only when it is called, for poptorch imports this module.
    poptorch = importlib.import_module("poptorch")
    names: Dict[str, Any] = {**vars(poptorch), "options": options, "torch": torch, "poptorch": poptorch}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        setter = line.strip()
        if not setter or setter.startswith("#"):
            continue
        try:
            # An options file is part of the program: the contract has its lines evaluated as Python.
            eval(f"options.{setter}", {}, names)
        except (SyntaxError, AttributeError, NameError, TypeError, ValueError, AssertionError) as error:
            raise ConfigFileError(f"{path}, line {number}: {setter!r} cannot be applied: {error}") from error


def _enumerations() -> Dict[str, Any]:
    return {name: value for name, value in vars(enums).items() if isinstance(value, enum.EnumMeta)}


def _named_value(value: Any) -> Any:
    """The member or the dtype that a string like "OutputMode.Sum" or "torch.half" names; everything else as it is."""
    if not isinstance(value, str):
        return value
    if value.startswith("torch.") and isinstance(getattr(torch, value[6:], None), torch.dtype):
        return getattr(torch, value[6:])
    enumeration, _, member = value.rpartition(".")
    found = _enumerations().get(enumeration.rpartition(".")[2])
    return found[member] if found is not None and member in found.__members__ else value
