"""Tells a listener what the threads of this process do; without one, `measured` costs a comparison."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import ContextManager, Optional, Type

from typing_extensions import Protocol


class Listener(Protocol):
    """What receives the spans; callable from any thread."""

    is_on: bool  # whether it wants the spans that begin now

    def begin(self, key: int, name: str, category: str) -> None:
        """A span begins in the current thread. `key` is unique among those that have not ended."""

    def end(self, key: int) -> None:
        """The span ends."""


_listener: Optional[Listener] = None
_NOTHING: ContextManager[None] = contextlib.nullcontext()


def listen(listener: Optional[Listener]) -> None:
    """Set the listener of this process."""
    global _listener
    _listener = listener


class _Measured(ContextManager[None]):
    __slots__ = ("_listener",)

    def __init__(self, listener: Listener, name: str, category: str) -> None:
        self._listener = listener
        listener.begin(id(self), name, category)

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._listener.end(id(self))


def measured(name: str, category: str) -> ContextManager[None]:
    """Return a context whose duration is a span of the current thread; enter it at once."""
    listener = _listener
    return _NOTHING if listener is None or not listener.is_on else _Measured(listener, name, category)
