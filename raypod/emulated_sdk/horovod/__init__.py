"""`horovod`, emulated: the host-side collectives of `horovod.torch`, over Gloo.

An installed Horovod with a PyTorch extension takes precedence: this package replaces itself with it, although the
emulated SDK comes first on `sys.path`. EMULATED_POD_HOROVOD=emulated selects the emulated one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Optional

from _pod.activation import HOROVOD


def _find_installed() -> Optional[ModuleSpec]:
    """Return the spec of the first Horovod elsewhere on `sys.path` that has a PyTorch extension, if selected."""
    if os.environ.get(HOROVOD) == "emulated":
        return None
    own_folder = Path(__file__).resolve().parent.parent
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        spec = None if folder == own_folder else PathFinder.find_spec(__name__, [str(folder)])
        if spec is not None and spec.loader is not None and _has_torch_extension(spec):
            return spec
    return None


def _has_torch_extension(spec: ModuleSpec) -> bool:
    folders = [Path(folder, "torch") for folder in spec.submodule_search_locations or []]
    return any(list(folder.glob(f"mpi_lib*{suffix}")) for folder in folders for suffix in EXTENSION_SUFFIXES)


def _replace_with(spec: ModuleSpec) -> None:
    """Put the installed package into `sys.modules`; the current import returns what it finds there."""
    installed = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = installed
    assert spec.loader is not None, "_find_installed returns specs with a loader only"
    spec.loader.exec_module(installed)


__version__ = "0.28.1+emulated"  # the release whose interface this is

_spec = _find_installed()
if _spec is not None:
    _replace_with(_spec)
