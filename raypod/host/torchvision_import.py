"""Lets `import torchvision` succeed beside a CPU-only torch.

torchvision's wheels on PyPI bring a C++ library built for CUDA. Beside a CPU-only torch it cannot be loaded, the
operators `nms` and `qnms` stay undeclared, and torchvision's own registration of their shapes then ends its import
with "operator torchvision::nms does not exist". Declaring the two schemas is all that is missing for its models,
transforms and data sets. Where the library loads, nothing is declared.

`install()` only leaves a note for the moment somebody imports torchvision; it imports neither torch nor torchvision.
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
    """Finds torchvision as everybody does, with the check before its first line."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)  # the search below must not find this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, spec.submodule_search_locations or [])
        return spec


class _Loader(importlib.abc.Loader):
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
    """Load torchvision's C++ library, or declare what its absence leaves undeclared. The result must be kept alive."""
    torch: Any = importlib.import_module("torch")
    libraries: List[Path] = [library for folder in folders for library in sorted(Path(folder).glob("_C*.so"))]
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:  # it needs CUDA libraries that a CPU-only torch does not bring
        declared = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            declared.define(schema)
        return declared
    return None


def install() -> None:
    """Arrange the check for the first `import torchvision` of this process; harmless when called again."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
