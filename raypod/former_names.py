"""Former names of packages, which existing programs import; accepted for one version, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Optional, Sequence

_FORMER = {
    "raypod.datasets": "raypod.training.data",
    "raypod.model": "raypod.training.models",
    "raypod.tasks": "raypod.training.tasks",
    "raypod.checkpoint": "raypod.training.checkpoint",
    "raypod.trackers": "raypod.observe.trackers",
    "raypod.trained": "raypod.api.inference",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module under its former name; both names are then the same module."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        name = current_name(fullname)
        if name == fullname or importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        name = current_name(spec.name)
        if spec.name in _FORMER:
            text = f"{spec.name} is now {name}; the former name ends with the next version"
            warnings.warn(text, DeprecationWarning, stacklevel=2)  # frames of importlib do not count
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which the import has replaced."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def current_name(name: str) -> str:
    """Return the name of a module or package after the move; `name` itself if it was not moved."""
    package = ".".join(name.split(".")[:2])
    return _FORMER.get(package, package) + name[len(package) :]


def accept() -> None:
    """Make the former names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
