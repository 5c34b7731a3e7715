"""Loads of a program's compiled operators, which are a warning here where Python implementations are named."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import PurePath
from typing import Any, Callable

import torch

from poptorch import findings
from poptorch.custom_operators import registry
from poptorch.environment import logger

_SYSTEM = ("/lib", "/usr/")  # folders whose libraries are not a program's own operators


class AbsentLibrary:
    """Takes the place of a library that was not loaded. It has no functions."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self._name} has no {name!r} here, as it was not loaded: {self._reason}")


def tolerate_absent() -> None:
    """Let `ctypes.cdll.LoadLibrary` and `torch.ops.load_library` accept operators that cannot be loaded."""
    ctypes.cdll.LoadLibrary = _tolerant(ctypes.cdll.LoadLibrary)  # type: ignore[method-assign]
    torch.ops.load_library = _tolerant(torch.ops.load_library)  # type: ignore[method-assign]


def _tolerant(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that only warns of a library of operators that cannot be loaded, if implementations are named."""

    @functools.wraps(load)
    def load_library(name: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(name, *args, **kwargs)
        except OSError as error:
            if not (_may_hold_operators(name) and (registry.is_named() or findings.is_active())):
                raise
            registry.load()
            _warn(os.fspath(name), str(error))
            return AbsentLibrary(os.fspath(name), str(error))

    return load_library


def _may_hold_operators(name: Any) -> bool:
    """Return whether a name is that of a program's own library: a path to a .so file, or the name of one."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    text = os.fspath(name)
    if not isinstance(text, str) or not text.endswith(".so") or text.startswith(_SYSTEM):
        return False
    # dlopen looks for a bare name in the folders of the system, and programs try several names of a library there.
    return os.sep in text or not PurePath(text).name.startswith("lib")


@functools.lru_cache(maxsize=None)
def _warn(name: str, reason: str) -> None:
    logger.warning(
        "%s was not loaded: %s. Its operators are those in Python that %s names, or of the emulated SDK",
        name,
        reason,
        registry.MODULES,
    )
