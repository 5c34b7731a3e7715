"""Functions that are called before and after every compilation (contract 2.6).

The contract does not say what a hook is given [I]: one that takes an argument gets the executor, any other nothing.
"""

from __future__ import annotations

import collections
import inspect
from typing import Any, Callable, Dict

from torch.utils.hooks import RemovableHandle

_Hook = Callable[..., Any]

before_compile: Dict[int, _Hook] = collections.OrderedDict()
after_compile: Dict[int, _Hook] = collections.OrderedDict()


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook before each compilation, until the handle's `remove()`. RuntimeError if not callable."""
    return _register(before_compile, hook)


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook after each compilation, until the handle's `remove()`. RuntimeError if not callable."""
    return _register(after_compile, hook)


def call(hooks: Dict[int, _Hook], executor: Any) -> None:
    """Call all hooks, in the order of their registration."""
    for hook in list(hooks.values()):
        hook(*([executor] if _takes_argument(hook) else []))


def _takes_argument(hook: _Hook) -> bool:
    try:
        inspect.signature(hook).bind(None)
    except TypeError:
        return False
    except ValueError:  # built in, and without a signature
        pass
    return True


def _register(hooks: Dict[int, _Hook], hook: _Hook) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook is a function; {hook!r} is not callable")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
