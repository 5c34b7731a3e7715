"""Tells of attributes that a program added to an optimizer and that the device ignores (contract 1.2, 4)."""

from __future__ import annotations

import logging
from typing import Iterable, Optional, Set

import torch

from poptorch._log import logger

# What torch's schedulers add.
_EXPECTED = frozenset(("step", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "total_steps"))


class AttributeChecks:
    """Knows the attributes of the first optimizer of a model.

    Each further one of a later optimizer is told once, as a warning; `is_relaxed` makes it a debug message
    (`Options.relaxOptimizerAttributesChecks`).
    """

    def __init__(self, is_relaxed: bool) -> None:
        self._level = logging.DEBUG if is_relaxed else logging.WARNING
        self._kind: Optional[type] = None
        self._of_whole: Set[str] = set()
        self._of_groups: Set[str] = set()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare; the first optimizer, and one of another class, sets what is known."""
        if type(optimizer) is not self._kind:
            self._kind, self._of_whole = type(optimizer), _public(vars(optimizer))
            self._of_groups = {name for group in optimizer.param_groups for name in group}
        self._tell("optimizer attribute", _public(vars(optimizer)), self._of_whole)
        for index, group in enumerate(optimizer.param_groups):
            self._tell(f"group {index} attribute", _public(group), self._of_groups)

    def _tell(self, what: str, found: Set[str], known: Set[str]) -> None:
        extra = sorted(found - known)
        known.update(extra)
        if extra:
            logger.log(
                self._level, f"Ignoring unexpected {what} in {getattr(self._kind, '__name__', '')} optimizer: {extra}"
            )


def _public(names: Iterable[str]) -> Set[str]:
    return {name for name in names if not name.startswith("_")} - _EXPECTED
