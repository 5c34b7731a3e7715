"""The network as the methods of a task get it."""

from __future__ import annotations

from typing import Any, Callable

from torch import nn


class TaskNetwork:
    """Calls `run`, which prepares the inputs of the network; everything else is that of the module.

    So `network.parameters()`, `network.head` and `network[0]` work, as for a term of the loss. A module in it that is
    called on its own gets its inputs as they are.
    """

    __slots__ = ("_module", "_run")

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the network."""
        return self._run(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, index: Any) -> Any:
        module: Any = self._module
        return module[index]
