"""Python attributes that a forward assigns to its modules.

A program is traced once: on the device a Python value is what it was then (contract 2.2). So what a forward leaves in
its modules' attributes does not reach the next one.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Optional, Tuple

import torch


class PythonState:
    """The attributes of a module and its submodules, or of those named, at the time of construction."""

    def __init__(self, module: torch.nn.Module, names: Optional[Collection[str]] = None) -> None:
        self._held: List[Tuple[str, Dict[str, Any], Dict[str, Any]]] = [
            (name, vars(part), dict(vars(part)))
            for name, part in module.named_modules()
            if names is None or name in names
        ]

    def changed(self) -> Tuple[str, ...]:
        """The names of the modules in which an attribute was added, removed or assigned."""
        return tuple(name for name, attributes, before in self._held if not _are_identical(attributes, before))

    def restore(self) -> None:
        """Give all attributes their values back."""
        for _, attributes, before in self._held:
            if not _are_identical(attributes, before):
                attributes.clear()
                attributes.update(before)


def _are_identical(attributes: Dict[str, Any], before: Dict[str, Any]) -> bool:
    return attributes.keys() == before.keys() and all(attributes[name] is value for name, value in before.items())
