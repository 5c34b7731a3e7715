"""Door `telemetry`: what the threads of this process do inside the SDK.

The SDK marks its own waits; nothing depends on where its code lies. With the Poplar SDK less is known:

- `waits_for_others`: only in a function of an installed Horovod. Whether a call of the device waits for IPUs of other
  processes, in C++, is not known: False.
- `peer_wait_s`: None. `listen` and `inspection` have no effect.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import time
from types import TracebackType
from typing import ContextManager, Dict, Iterator, Optional, Protocol, Type

from _pod import activation

_HOROVOD = "horovod.torch"  # the modules of an installed Horovod, which marks nothing itself

_waits: Dict[int, int] = {}  # nested waits by thread; each thread changes its own entry only
_served: Dict[int, int] = {}  # the thread that waits for this one, by helper thread
_lock = threading.Lock()
_total_s = 0.0
_is_inspection = contextvars.ContextVar("is_inspection", default=False)


class Listener(Protocol):
    """What receives the spans; callable from any thread."""

    is_on: bool  # whether it wants the spans that begin now

    def begin(self, key: int, name: str, category: str) -> None:
        """A span begins in the current thread. `key` is unique among those that have not ended."""

    def end(self, key: int) -> None:
        """The span ends."""


_listener: Optional[Listener] = None
_NOTHING: ContextManager[None] = contextlib.nullcontext()


def waits_for_others(thread: int) -> bool:
    """Return whether a thread (`threading.get_ident`), or a helper of it, waits for other processes of its pod."""
    return any(_served.get(each, each) == thread for each in list(_waits)) or _is_in_horovod(thread)


def peer_wait_s() -> Optional[float]:
    """Return the seconds for which this process has waited for others; waits of concurrent threads add up."""
    return None if activation.is_fallback() else _total_s


def listen(listener: Optional[Listener]) -> None:
    """Set the listener of this process; with the Poplar SDK there is none."""
    global _listener
    _listener = None if activation.is_fallback() else listener


@contextlib.contextmanager
def inspection() -> Iterator[None]:
    """Context of compiling models that never run: no backward pass is tried, and their memory is not judged."""
    token = _is_inspection.set(True)
    try:
        yield
    finally:
        _is_inspection.reset(token)


def is_inspection() -> bool:
    """Return whether a model that is compiled never runs."""
    return _is_inspection.get()


@contextlib.contextmanager
def waiting(doing: Optional[str] = None) -> Iterator[None]:
    """Mark the present thread as waiting for others within the block.

    Args:
        doing: if given, the duration counts in `peer_wait_s`, however the block ends, and is a span of this name.
    """
    global _total_s
    thread, began_s = threading.get_ident(), time.monotonic()
    _waits[thread] = _waits.get(thread, 0) + 1
    try:
        with _NOTHING if doing is None else span(doing, "wait for peers"):
            yield
    finally:
        _waits[thread] -= 1
        if not _waits[thread]:
            del _waits[thread]
        if doing is not None:
            with _lock:
                _total_s += time.monotonic() - began_s


@contextlib.contextmanager
def working_for(thread: int) -> Iterator[None]:
    """Within the block the present thread works for `thread`, which waits for it: its waits are that thread's, too."""
    helper = threading.get_ident()
    _served[helper] = thread
    try:
        yield
    finally:
        del _served[helper]


class _Span:
    __slots__ = ("_listener",)

    def __init__(self, listener: Listener, name: str, category: str) -> None:
        self._listener = listener
        listener.begin(id(self), name, category)

    def __enter__(self) -> None:
        """The span has begun."""

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._listener.end(id(self))


def span(name: str, category: str) -> ContextManager[None]:
    """Return a context whose duration is a span of the current thread; enter it at once.

    Without a listener it costs a comparison.
    """
    listener = _listener
    return _NOTHING if listener is None or not listener.is_on else _Span(listener, name, category)


def _is_in_horovod(thread: int) -> bool:
    horovod = sys.modules.get("horovod")
    if horovod is None or str(getattr(horovod, "__file__", None)).startswith(activation.FOLDER):
        return False
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{_HOROVOD}."):
            return True
        frame = frame.f_back
    return False


def _reset_in_forked_child() -> None:
    """Forget the parent's threads."""
    global _lock
    _lock = threading.Lock()
    _waits.clear()
    _served.clear()


os.register_at_fork(after_in_child=_reset_in_forked_child)
