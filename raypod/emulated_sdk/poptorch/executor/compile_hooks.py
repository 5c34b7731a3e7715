"""What runs around each compilation: the registered hooks and the progress bar."""

from __future__ import annotations

import collections
import contextlib
from typing import Any, Callable, Dict, Iterator

from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

_Hook = Callable[..., Any]

_before_compile: Dict[int, _Hook] = collections.OrderedDict()
_after_compile: Dict[int, _Hook] = collections.OrderedDict()

_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"  # as the SDK's: a percentage has no rate


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook, without arguments, before each compilation, until the handle's `remove()`.

    Raises:
        RuntimeError: the hook is not callable.
    """
    return _register(_before_compile, hook)


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook after each compilation; otherwise as `registerPreCompileHook`."""
    return _register(_after_compile, hook)


@contextlib.contextmanager
def around_compilation(shows_progress: bool) -> Iterator[None]:
    """Context of a compilation: calls the hooks before and after it, in the order of registration."""
    _call(_before_compile)
    with _progress_bar() if shows_progress else contextlib.nullcontext():
        yield
    _call(_after_compile)


@contextlib.contextmanager
def _progress_bar() -> Iterator[None]:
    with tqdm(total=100, desc="Graph compilation", bar_format=_BAR_FORMAT) as bar:
        try:
            yield
        finally:
            bar.update(100)


def _call(hooks: Dict[int, _Hook]) -> None:
    for hook in list(hooks.values()):
        hook()


def _register(hooks: Dict[int, _Hook], hook: _Hook) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook must be callable, and {hook!r} is not")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
