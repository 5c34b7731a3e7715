"""Call the functions that a user names as `module:function`, for custom data sets and models."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from raypod.errors import ConfigError


def call(name: str, key: str, *arguments: Any) -> Any:
    """Import `module:function`, also from the current folder, and return its result for `arguments`.

    Args:
        name: `module:function`.
        key: the config key whose value is `name`, for messages.

    Raises:
        ConfigError: the function does not exist or does not accept the arguments.
    """
    function = _import_attribute(name, key)
    if not callable(function):
        raise ConfigError(f"{key} = {name!r}: {type(function).__name__} is not callable")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return function(*arguments)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = ", ".join(map(repr, arguments))
        raise ConfigError(f"{key} = {name!r} is called with ({shown}), and takes {signature}: {error}") from None
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
