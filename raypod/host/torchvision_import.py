"""Make `import torchvision` work with a CPU-only torch.

torchvision's wheels on PyPI contain a C++ library built for CUDA. With a CPU-only torch it cannot be loaded, so the
operators `nms` and `qnms` are not declared, and `import torchvision` fails with "operator torchvision::nms does not
exist". Its models, transforms and data sets only need the two declarations, which this module adds in that case.

`install()` adds an import hook; it imports neither torch nor torchvision. This file must not import raypod:
`startup/sitecustomize.py` loads it by path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, List, Optional, Sequence

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torchvision as usual, and replaces its loader by `_Loader`."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)  # so that the search below does not call this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, spec.submodule_search_locations or [])
        return spec


class _Loader(importlib.abc.Loader):
    """Declares missing operators before it executes the module."""

    def __init__(self, loader: Any, folders: Sequence[str]) -> None:
        self._loader = loader
        self._folders = folders

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        found: Optional[ModuleType] = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_raypod_schemas"] = _declare_missing_operators(self._folders)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)


def _declare_missing_operators(folders: Sequence[str]) -> Any:
    """Load torchvision's C++ library, or declare its operators. The result must be kept alive."""
    torch: Any = importlib.import_module("torch")
    libraries: List[Path] = [library for folder in folders for library in sorted(Path(folder).glob("_C*.so"))]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:  # it needs CUDA libraries that a CPU-only torch does not have
        declared = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            declared.define(schema)
        return declared
    return None


def install() -> None:
    """Install the import hook for torchvision in this process, unless it is installed or torchvision is imported."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
