"""Read options from text: the JSON of the environment variable POPTORCH_DEFAULT_OPTIONS, and options files."""

from __future__ import annotations

import enum
import functools
import importlib
import json
from pathlib import Path
from typing import Any, Dict

import torch

from poptorch import enums
from poptorch.errors import ConfigFileError
from poptorch.options.base import OptionsDict


def apply_json(options: OptionsDict, text: str) -> None:
    """Call the setters in a JSON object such as {"Training.gradientAccumulation": 4}.

    A value is the argument or the list of arguments of its setter; strings such as "OutputMode.Sum" or "torch.half"
    become enumeration members and dtypes.

    Raises:
        AttributeError: a setter does not exist.
        ValueError: the text is not a JSON object.
    """
    settings = json.loads(text)
    if not isinstance(settings, dict):
        raise ValueError(f"Options in JSON must be an object, e.g. {{'Training.gradientAccumulation': 4}}, got {text}")
    for dotted_name, value in settings.items():
        setter = functools.reduce(getattr, dotted_name.split("."), options)
        if not callable(setter):
            raise AttributeError(f"{dotted_name} is not a setter: use a setter such as deviceIterations")
        arguments = value if isinstance(value, list) else [value]
        setter(*map(_named_value, arguments))


def apply_file(options: OptionsDict, path: str) -> None:
    """Evaluate `options.<line>` for each line of a file; blank lines and lines that start with # are skipped.

    Raises:
        ConfigFileError: a line cannot be applied; the message has the file, the line and the reason.
    """
    poptorch = importlib.import_module("poptorch")  # at call time, as poptorch imports this module
    names: Dict[str, Any] = {**vars(poptorch), "options": options, "torch": torch, "poptorch": poptorch}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        setter = line.strip()
        if not setter or setter.startswith("#"):
            continue
        try:
            # The SDK evaluates the lines as Python: an options file is part of the program.
            eval(f"options.{setter}", {}, names)
        except (SyntaxError, AttributeError, NameError, TypeError, ValueError, AssertionError) as error:
            raise ConfigFileError(f"{path}, line {number}: cannot apply {setter!r}: {error}") from error


def _enumerations() -> Dict[str, Any]:
    return {name: value for name, value in vars(enums).items() if isinstance(value, enum.EnumMeta)}


def _named_value(value: Any) -> Any:
    """Return the enumeration member or dtype that a string names; any other value unchanged."""
    if not isinstance(value, str):
        return value
    if value.startswith("torch.") and isinstance(getattr(torch, value[6:], None), torch.dtype):
        return getattr(torch, value[6:])
    enumeration, _, member = value.rpartition(".")
    found = _enumerations().get(enumeration.rpartition(".")[2])
    return found[member] if found is not None and member in found.__members__ else value
