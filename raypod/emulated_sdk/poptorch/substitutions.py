"""PopTorch's package for PyTorch Geometric: its parsers, and the functions that it replaces on the device."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any, ClassVar, List, Protocol

from poptorch.environment import logger


class SubstitutionManager(Protocol):
    """Replaces functions, for example of a library of layers, by others that suit an IPU."""

    def replace(self) -> None:
        """Replace the functions."""

    def restore(self) -> None:
        """Restore the original functions."""


class Substitutions:
    """Context in which the functions of all registered managers are replaced.

    The SDK enters it when it compiles. The emulation also enters it for every call, as it runs the forward again.
    """

    _subsitution_manager_types: ClassVar[List[Any]] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as restores:  # also if a later manager raises an exception
            for kind in self._subsitution_manager_types:
                manager: SubstitutionManager = kind()
                restores.callback(manager.restore)
                manager.replace()
            self._restores = restores.pop_all()

    def __exit__(self, *exc_info: Any) -> None:
        self._restores.close()

    @classmethod
    def registerSubsitutionManager(cls, type: Any) -> None:
        """Register a class of managers, once. Its objects have the methods of `SubstitutionManager`."""
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)


def register_geometric() -> None:
    """Register the parsers and the managers of poptorch_geometric if it is installed, as the SDK does when imported."""
    if importlib.util.find_spec("poptorch_geometric") is None:
        return
    try:
        importlib.import_module("poptorch_geometric.types").registerCustomArgParsers()
    except ImportError as error:  # of a library that poptorch_geometric needs; the program may not use it
        logger.warning("poptorch_geometric is installed, but cannot be imported: %s", error)
