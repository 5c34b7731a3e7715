"""What a user hands over as `module:attribute`: data sets and models of one's own."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from raypod.errors import ConfigError


def call(name: str, key: str, *arguments: Any) -> Any:
    """What the function that `module:function` names gives for `arguments`; modules of the current folder are found.

    Raises:
        ConfigError: there is no such function, or it does not take them; `key` is the config key that names it.
    """
    function = _import_attribute(name, key)
    if not callable(function):
        raise ConfigError(f"{key} = {name!r}: {type(function).__name__} is no function that could be called")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some built-in ones nothing is known
        return function(*arguments)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        told = ", ".join(map(repr, arguments))
        raise ConfigError(f"{key} = {name!r} is called with ({told}), and takes {signature}: {error}") from None
    return function(*arguments)


def _import_attribute(name: str, key: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not attribute or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{key} = {name!r}: write module:function, as in my_package.my_module:make")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{key} = {name!r}: {' '.join(str(error).split())}") from None
    except AttributeError:
        raise ConfigError(f"{key} = {name!r}: the module {module_name} has no {attribute!r}") from None
