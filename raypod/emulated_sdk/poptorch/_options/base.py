"""`OptionsDict`, the base of every group of options (contract 1.1): typed values, readable as attributes, freezable."""

from __future__ import annotations

import copy
import enum
import numbers
import os
from typing import Any, ClassVar, Dict, List, Mapping, TypeVar

_Self = TypeVar("_Self", bound="OptionsDict")
_OWN = ("_values", "_is_frozen")


class OptionsDict:
    """Named values with the types of their defaults.

    A value is read by `options.name` or `options("name")` and assigned by `options.name = value` or `set(name=value)`.
    Unknown names and values of another type raise AssertionError; any change after freezing raises AttributeError.
    """

    # Names of older SDKs, and what took their place.
    _renamed: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **default_values: Any) -> None:
        object.__setattr__(self, "_values", default_values)
        object.__setattr__(self, "_is_frozen", False)

    def set(self, **kwargs: Any) -> None:
        """Assign existing options. AssertionError for unknown names and wrong types, AttributeError when frozen."""
        for name, value in kwargs.items():
            self.checkIsFrozen(name)
            known = ", ".join(sorted(self._values))
            assert self.exists(name), f"Invalid option {name!r}: valid options are {known}"
            self._values[name] = _checked(name, value, self._values[name])

    def createOrSet(self, **kwargs: Any) -> None:
        """Assign options, creating those that do not exist yet."""
        for name, value in kwargs.items():
            if self.exists(name):
                self.set(**{name: value})
            else:
                self.checkIsFrozen(name)
                self._values[name] = value

    def _set_number(self, least: int, **kwargs: Any) -> None:
        """`createOrSet` for integers of at least `least`; AssertionError for others."""
        for name, value in kwargs.items():
            assert is_integer(value), f"Unexpected type {type(value)} for option {name!r}: expected an integer"
            assert value >= least, f"Option {name!r} must be at least {least}, got {value}"
            self.createOrSet(**{name: int(value)})

    def _set_typed(self, kind: type, **kwargs: Any) -> None:
        """`createOrSet` for values of one type; AssertionError for others."""
        for name, value in kwargs.items():
            assert isinstance(value, kind), f"Unexpected type {type(value)} for option {name!r}: expected {kind}"
            self.createOrSet(**{name: value})

    def exists(self, option: str) -> bool:
        """Whether the option has a value."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the option's value."""
        self.checkIsFrozen(option)
        self._values.pop(option, None)

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise AttributeError when the options may not change any more."""
        if self._is_frozen:
            what = "" if option is None else f": {option!r} is in use by a model or a data loader; change a clone()"
            raise AttributeError(f"Can't modify frozen Options{what}")

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Return `other` and these values in one dictionary; AssertionError when a name is in both."""
        values = self.toDict()
        both = sorted(set(values) & set(other))
        assert not both, f"Options given twice: {', '.join(both)}"
        return {**other, **values}

    def toDict(self) -> Dict[str, Any]:
        """The values as plain Python, enumeration members as their values."""
        return {name: _plain(value) for name, value in self._values.items()}

    def __call__(self, option: str) -> Any:
        assert self.exists(option), f"Invalid option {option!r}: it has no value"
        return self._values[option]

    def __getattr__(self, option: str) -> Any:
        # Reached only for names that are no ordinary attribute; copy and pickle ask before `_values` exists.
        values = self.__dict__.get("_values", {})
        if option in values:
            return values[option]
        now = f": it is called {self._renamed[option]!r} now" if option in self._renamed else ""
        raise AttributeError(f"{type(self).__name__} has no option {option!r}{now}")

    def __setattr__(self, option: str, value: Any) -> None:
        if option in self.__dict__.get("_values", {}):
            self.set(**{option: value})
            return
        if option not in _OWN:
            self.checkIsFrozen(option)
        object.__setattr__(self, option, value)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(self._values.items()))
        return f"{type(self).__name__}({values})"

    def _groups(self) -> Dict[str, OptionsDict]:
        """The nested groups of options, by attribute name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, OptionsDict)}

    def _freeze(self) -> None:
        for group in self._groups().values():
            group._freeze()
        self._is_frozen = True

    def _unfrozen_copy(self: _Self) -> _Self:
        clone = copy.deepcopy(self)
        clone._unfreeze()
        return clone

    def _unfreeze(self) -> None:
        self._is_frozen = False
        for group in self._groups().values():
            group._unfreeze()


def is_integer(value: Any) -> bool:
    """Whether this is a whole number, also one of numpy's; truth values are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def names(option: str, value: Any) -> List[str]:
    """A list of strings; AssertionError for anything else, a single string among it."""
    is_list = isinstance(value, (list, tuple, set)) and all(isinstance(item, str) for item in value)
    assert is_list, f"Option {option!r} is a list of strings, got {value!r}"
    return list(value)


def path_text(option: str, value: Any) -> str:
    """A path as text; AssertionError for anything else."""
    assert isinstance(value, (str, os.PathLike)), f"Option {option!r} is a path, got {value!r}"
    return os.fspath(value)


def _checked(name: str, value: Any, present: Any) -> Any:
    """`value`, brought to the type of the present one; AssertionError when its own is another."""
    expected = type(present)
    unexpected = f"Unexpected type {type(value)} for option {name!r}: expected {expected}"
    if isinstance(present, enum.IntEnum):
        is_other = isinstance(value, enum.Enum) and not isinstance(value, expected)
        assert is_integer(value), unexpected
        assert not is_other, unexpected
        known = {int(member): member for member in expected.__members__.values()}
        assert value in known, f"{value} is no {expected.__name__}: these are {known}"
        return known[int(value)]
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
