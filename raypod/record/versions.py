"""The versions of what a run computes with, for whoever looks at its files later."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Tuple

_PACKAGES = ("raypod", "torch", "numpy", "ray", "poptorch")


def versions() -> Tuple[Tuple[str, str], ...]:
    """(name, version) of Python and of the packages that are installed."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)
