"""Functions that are called before and after every compilation (contract 2.6)."""

from __future__ import annotations

import collections
from typing import Any, Callable, Dict

from torch.utils.hooks import RemovableHandle

_Hook = Callable[[Any], Any]

before_compile: Dict[int, _Hook] = collections.OrderedDict()
after_compile: Dict[int, _Hook] = collections.OrderedDict()


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call `hook(executor)` before each compilation, until the handle's `remove()`. RuntimeError if not callable."""
    return _register(before_compile, hook)


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call `hook(executor)` after each compilation, until the handle's `remove()`. RuntimeError if not callable."""
    return _register(after_compile, hook)


def _register(hooks: Dict[int, _Hook], hook: _Hook) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook is called with the executor; {hook!r} is not callable")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
