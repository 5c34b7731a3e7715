"""`OptionsDict`, the base class of every group of options, and options as text (JSON and options files)."""

from __future__ import annotations

import copy
import enum
import functools
import importlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Mapping, Tuple, Type, TypeVar

import torch

from poptorch import enums
from poptorch.errors import ConfigFileError

_Self = TypeVar("_Self", bound="OptionsDict")
_INTERNAL = ("_values", "_is_frozen")


def hint_of_removed(removed: Mapping[str, Tuple[str, str]], name: str) -> str:
    """Return the end of a message: since which version a name is gone, and its replacement; empty for other names."""
    if name not in removed:
        return ""
    version, replacement = removed[name]
    return f": PopTorch {version} removed it; {replacement}"


class OptionsDict:
    """Named values with the types of their defaults.

    `options.name` or `options("name")` reads a value; `options.name = value` or `set(name=value)` assigns it.

    Raises:
        AssertionError: an unknown name, or a value of another type.
        AttributeError: any change after the options were frozen.
    """

    # Options of older SDKs: the version of PopTorch without them, and what to use.
    _removed: ClassVar[Mapping[str, Tuple[str, str]]] = {}

    def __init__(self, **default_values: Any) -> None:
        object.__setattr__(self, "_values", default_values)
        object.__setattr__(self, "_is_frozen", False)

    def set(self, **kwargs: Any) -> None:
        """Assign existing options; AssertionError for unknown names and wrong types, AttributeError when frozen."""
        for name, value in kwargs.items():
            self.checkIsFrozen(name)
            valid = ", ".join(sorted(self._values))
            assert self.exists(name), f"Invalid option {name!r}: valid options are {valid}"
            self._values[name] = _checked(name, value, self._values[name])

    def createOrSet(self, **kwargs: Any) -> None:
        """Assign options, creating those that do not exist yet."""
        for name, value in kwargs.items():
            if self.exists(name):
                self.set(**{name: value})
            else:
                self.checkIsFrozen(name)
                self._values[name] = value

    def _set_number(self: _Self, minimum: int, **kwargs: Any) -> _Self:
        """Call `createOrSet` with integers of at least `minimum`, and return the object; else AssertionError."""
        for name, value in kwargs.items():
            assert is_integer(value), f"Unexpected type {type(value)} for option {name!r}: expected an integer"
            assert value >= minimum, f"Option {name!r} must be at least {minimum}, got {value}"
            self.createOrSet(**{name: int(value)})
        return self

    def exists(self, option: str) -> bool:
        """Return whether the option has a value."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the option's value, if it has one."""
        self.checkIsFrozen(option)
        if self.exists(option):
            del self._values[option]

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise AttributeError if the options are frozen."""
        if self._is_frozen:
            hint = "" if option is None else f": {option!r} is in use by a model or a data loader; change a clone()"
            raise AttributeError(f"Can't modify frozen Options{hint}")

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Return `other` merged with these values; AssertionError for a name that is in both."""
        values = {name: _plain(value) for name, value in self._values.items()}
        both = sorted(set(values) & set(other))
        assert not both, f"Duplicate options: {', '.join(both)}"
        return {**other, **values}

    def toDict(self) -> Dict[str, Any]:
        """Return the values as plain Python objects: enumeration members as their values, tuples as lists."""
        return self.update({})

    def __call__(self, option: str) -> Any:
        return self._values[option] if option in self._values else getattr(self, option)  # a setter may have the name

    def __getattr__(self, option: str) -> Any:
        # Called only for names that are not ordinary attributes; copy and pickle call it before `_values` exists.
        values = self.__dict__.get("_values", {})
        if option in values:
            return values[option]
        raise AttributeError(f"{type(self).__name__} has no option {option!r}{hint_of_removed(self._removed, option)}")

    def __setattr__(self, option: str, value: Any) -> None:
        if not option.startswith("_"):
            self.set(**{option: value})
            return
        if option not in _INTERNAL:
            self.checkIsFrozen(option)
        object.__setattr__(self, option, value)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({values})"

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, is_frozen: bool) -> None:
        for group in vars(self).values():
            if hasattr(group, "_is_frozen"):
                group._is_frozen = is_frozen
        self._is_frozen = is_frozen

    def __deepcopy__(self: _Self, memo: Dict[int, Any]) -> _Self:
        # A copy is not frozen, nor are its groups, which are copied in the same way.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy({**vars(self), "_is_frozen": False}, memo))
        return copied


def is_integer(value: Any) -> bool:
    """Return whether the value is an integer of Python; neither bool nor NumPy's count, as in the SDK."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_member(value: Any, enumeration: Type[enum.Enum]) -> None:
    """Raise AssertionError unless the value is a member of the enumeration itself: not its number."""
    assert isinstance(value, enumeration), f"expected a member of poptorch.{enumeration.__name__}, got {value!r}"


def names(option: str, value: Any) -> List[str]:
    """Return the value as a list of strings; AssertionError for anything else, including a single string."""
    is_list = isinstance(value, (list, tuple, set)) and all(isinstance(item, str) for item in value)
    assert is_list, f"Option {option!r} must be a list of strings, got {value!r}"
    return list(value)


def path_text(option: str, value: Any) -> str:
    """Return a path as a string; AssertionError for anything else."""
    assert isinstance(value, (str, os.PathLike)), f"Option {option!r} must be a path, got {value!r}"
    return os.fspath(value)


def _checked(name: str, value: Any, present: Any) -> Any:
    """Return `value` as the type of the present value; AssertionError if its type does not match."""
    expected = type(present)
    unexpected = f"Unexpected type {type(value)} for option {name!r}: expected {expected}"
    if isinstance(present, enum.IntEnum):
        is_other = isinstance(value, enum.Enum) and not isinstance(value, expected)
        assert is_integer(value), unexpected
        assert not is_other, unexpected
        members = {int(member): member for member in expected.__members__.values()}
        assert value in members, f"{value} is not a valid {expected.__name__}: valid values are {members}"
        return members[int(value)]
    if expected is int:
        assert is_integer(value), unexpected
        return int(value)
    assert isinstance(value, expected), unexpected
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


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
        ConfigFileError: a line cannot be applied. The message has the file, the reason, and the line and its number
            among those that are not skipped.
    """
    poptorch = importlib.import_module("poptorch")  # at call time, as poptorch imports this module
    names: Dict[str, Any] = {**vars(poptorch), "options": options, "torch": torch, "poptorch": poptorch}
    stripped = (line.strip() for line in Path(path).read_text().splitlines())
    setters = [line for line in stripped if line and not line.startswith("#")]
    for number, setter in enumerate(setters, start=1):  # the SDK, too, counts the lines that have a setter
        try:
            # The SDK evaluates the lines as Python: an options file is part of the program.
            eval(f"options.{setter}", {}, names)
        except (SyntaxError, AttributeError, NameError, TypeError, ValueError, AssertionError) as error:
            detail = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigFileError(
                f"{type(error).__name__} at line {number} of {Path(path).name}: {detail}\n> options.{setter}"
            ) from error


def _named_value(value: Any) -> Any:
    """Return the enumeration member or dtype that a string names; any other value unchanged."""
    if not isinstance(value, str):
        return value
    if value.startswith("torch.") and isinstance(getattr(torch, value[6:], None), torch.dtype):
        return getattr(torch, value[6:])
    enumeration, _, member = value.rpartition(".")
    found = getattr(enums, enumeration.rpartition(".")[2], None)
    return found[member] if isinstance(found, enum.EnumMeta) and member in found.__members__ else value
