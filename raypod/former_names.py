"""Former names of packages, which existing programs import; accepted for one version, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import Any, Optional, Sequence

_FORMER = {
    "raypod.datasets": "raypod.training.data",
    "raypod.model": "raypod.training.models",
    "raypod.tasks": "raypod.training.tasks",
    "raypod.checkpoint": "raypod.training.checkpoint",
    "raypod.trackers": "raypod.observe.trackers",
    "raypod.trained": "raypod.api.inference",
    "raypod.commands": "raypod.cli",
}


class _Finder:
    """Finds a module under its former name; both names are then the same module.

    Not a subclass of `importlib.abc.MetaPathFinder`, whose module takes as long to import as `raypod` itself.
    """

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return a specification for a former name; None for other names, and for modules that do not exist."""
        name = current_name(fullname)
        if name == fullname:
            return None
        import importlib.util  # only where a former name is used

        loader: Any = self
        return None if importlib.util.find_spec(name) is None else importlib.machinery.ModuleSpec(fullname, loader)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module of the present name, and warn of the former one."""
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
