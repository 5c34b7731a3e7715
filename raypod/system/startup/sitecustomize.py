"""Runs at the start of every Python process that raypod starts: this folder is on its PYTHONPATH.

Installs the import hook for torchvision, lets programs load absent custom operators before they import poptorch if
EMULATED_POD_CUSTOM_OPS names others, and makes the emulated SDK's Horovod importable for a program that uses an
installed SDK and finds no Horovod. Then runs the environment's own `sitecustomize`, which this file shadows.
The hook is loaded by path, because the program may run in an environment where raypod is not installed.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _load(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    module.__dict__.get("install", lambda: None)()


class _HorovodFallback:
    """Finds Horovod, and what it connects by, in the emulated SDK: not its poptorch, in the place of a missing one."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        is_of_horovod = name in ("horovod", "_pod")
        return importlib.machinery.PathFinder.find_spec(name, [_fallback]) if is_of_horovod else None


def _import_poptorch_at_failed_load() -> None:
    import ctypes

    load = ctypes.cdll.LoadLibrary

    def load_library(name):  # type: ignore[no-untyped-def]
        try:
            return load(name)
        except OSError:
            if ctypes.cdll.LoadLibrary is not load_library:  # poptorch is imported
                raise
            ctypes.cdll.LoadLibrary = load  # type: ignore[method-assign]
            with contextlib.suppress(ImportError):
                importlib.import_module("poptorch")  # the emulated one replaces LoadLibrary
            return ctypes.cdll.LoadLibrary(name)

    ctypes.cdll.LoadLibrary = load_library  # type: ignore[method-assign]


if os.environ.get("EMULATED_POD_CUSTOM_OPS"):
    _import_poptorch_at_failed_load()
_fallback = os.environ.get("RAYPOD_HOROVOD_FALLBACK", "")
if _fallback:
    sys.meta_path.append(_HorovodFallback)
_here = Path(__file__).resolve().parent
_load("_raypod_torchvision_import", str(_here.parent / "torchvision_import.py"))
_others = [entry for entry in sys.path if Path(entry or ".").resolve() != _here]
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _next is not None and _next.origin is not None:
    _load("sitecustomize", _next.origin)
