"""What a user hands over as `module:attribute`: data sets and models of one's own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from raypod.errors import ConfigError


def import_attribute(name: str, key: str) -> Any:
    """The object that `module:attribute` names; modules of the current folder are found.

    Raises:
        ConfigError: there is no such module or attribute; `key` is the config key that names it.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from None
    except AttributeError:
        raise ConfigError(f"{key} = {name!r}: the module {module_name} has no {attribute!r}") from None
