"""The doors of the emulated SDK: the only module of raypod that knows where it lies, and imports them.

Importing it does not make the emulated `poptorch` importable: `sdk.select` does, which decides between it and an
installed one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_PACKAGE = "_pod"
_FOLDER = Path(__file__).resolve().parent.parent / "emulated_sdk"


def _load_package() -> None:
    """Import the package of the doors from its folder, so that Python finds its modules."""
    spec = importlib.machinery.PathFinder.find_spec(_PACKAGE, [str(_FOLDER)])
    assert spec is not None, "it is a part of raypod"
    assert spec.loader is not None, "it is no namespace package"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


if _PACKAGE not in sys.modules:
    _load_package()

from _pod import activation, rendezvous, telemetry  # noqa: E402 - importable from here on

__all__ = ["activation", "rendezvous", "telemetry"]
