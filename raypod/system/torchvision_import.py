"""Make `import torchvision` work with a CPU-only torch.

torchvision's wheels on PyPI contain a C++ library built for CUDA. With a CPU-only torch it cannot be loaded, so the
operators `nms` and `qnms` are not declared, and `import torchvision` fails with "operator torchvision::nms does not
exist". Its models, transforms and data sets only need the two declarations, which this module adds in that case.

Newer torchvision imports torch's compiler for one function of one operator, in every process (measured with 0.28 and
torch 2.13: 3.4 s and 64 MiB). Here the function imports it when it is called.

`install()` adds an import hook; it imports neither torch nor torchvision. This file must not import raypod:
`startup/sitecustomize.py` loads it by path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Optional, Sequence

_EXTENSION = "torchvision.extension"  # loads the C++ library; torchvision imports it before it uses an operator
_COMPILED = "torchvision.ops.roi_align"
_IMPORT = "from torch._dynamo.utils import is_compile_supported\n"
_LATER_IMPORT = (
    "is_compile_supported = lambda kind: "
    "__import__('torch._dynamo.utils', fromlist=['utils']).is_compile_supported(kind)\n"
)
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds two modules as usual, and replaces their loaders by `_Loader` and `_LateLoader`."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name not in (_EXTENSION, _COMPILED):
            return None
        sys.meta_path.remove(self)  # so that the search below does not call this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader) if name == _EXTENSION else _LateLoader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Declares missing operators after it has executed the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        found: Optional[ModuleType] = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._restored(module).exec_module(module)
        module.__dict__["_raypod_schemas"] = _declare_missing_operators()

    def _restored(self, module: ModuleType) -> Any:
        """Return the usual loader, which the module has from now on."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        return self._loader


class _LateLoader(_Loader):
    """Executes the module without the import of torch's compiler, if it has that line."""

    def exec_module(self, module: ModuleType) -> None:
        source = self._restored(module).get_source(module.__name__) or ""
        if source.count(_IMPORT) == 1:
            exec(compile(source.replace(_IMPORT, _LATER_IMPORT), str(module.__file__), "exec"), module.__dict__)
        else:
            self._loader.exec_module(module)


def _declare_missing_operators() -> Any:
    """Declare the operators that neither the C++ library nor another import hook has declared.

    Returns:
        The declarations, which end when the object is deleted.
    """
    torch: Any = importlib.import_module("torch")
    try:  # a namespace has any number of fragments, but only one "DEF"
        declared = torch.library.Library("torchvision", "FRAGMENT")
    except ValueError:  # torch 2.0 has no fragments; its torchvision uses no operator while it is imported
        return None
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            declared.define(name + _ARGUMENTS)
    return declared


def install() -> None:
    """Install the import hook for torchvision in this process, unless it is installed or torchvision is imported."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
