"""`horovod`, emulated: the host-side collectives of `horovod.torch` over the emulated pod's wires (contract section 8).

A real Horovod wins: if one that was built for PyTorch lies elsewhere on `sys.path`, this package becomes it, although
our folder stands before it. EMULATED_POD_HOROVOD=emulated keeps the emulated one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Optional


def _real_horovod() -> Optional[ModuleSpec]:
    """The spec of a Horovod elsewhere on `sys.path` that has a PyTorch extension, if there is one and it is wanted."""
    if os.environ.get("EMULATED_POD_HOROVOD") == "emulated":
        return None
    here = Path(__file__).resolve().parent.parent
    for entry in sys.path:
        folder = Path(entry or ".").resolve()
        spec = None if folder == here else PathFinder.find_spec(__name__, [str(folder)])
        if spec is not None and spec.loader is not None and _has_torch_extension(spec):
            return spec
    return None


def _has_torch_extension(spec: ModuleSpec) -> bool:
    folders = [Path(folder, "torch") for folder in spec.submodule_search_locations or []]
    return any(list(folder.glob(f"mpi_lib*{suffix}")) for folder in folders for suffix in EXTENSION_SUFFIXES)


def _become(spec: ModuleSpec) -> None:
    """Puts the real package into this one's place; the import under way returns what it finds there."""
    real = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = real
    assert spec.loader is not None, "_real_horovod returns specs with a loader only"
    spec.loader.exec_module(real)


__version__ = "0.28.1+emulated"  # the one whose interface this is

_spec = _real_horovod()
if _spec is not None:
    _become(_spec)
