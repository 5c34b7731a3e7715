"""Records what the threads of this process do, and when, for the profile of a run.

There is one recorder per process: loaders, the checkpoint writer and the SDK run in threads of their own. While it is
off, `measured` costs a comparison.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import ContextManager, Dict, List, Sequence, Tuple

from raypod.events import Span

MAX_SPANS = 50_000  # that are kept until they are taken


class SpanRecorder:
    """The spans of this process. `is_on` decides whether spans that begin are recorded."""

    def __init__(self) -> None:
        self.is_on = False
        self._spans: List[Span] = []
        self._open: Dict[int, Tuple[str, str, float, str]] = {}  # by id: what has not ended
        self._dropped = 0

    def reset(self, is_on: bool) -> None:
        self.is_on, self._spans, self._open, self._dropped = is_on, [], {}, 0

    def add(self, name: str, category: str, began_s: float, ended_s: float) -> None:
        """Add a span of the current thread; callable from any thread."""
        self._append(Span(name, category, began_s, ended_s, threading.current_thread().name))

    def add_steps(self, steps: Sequence[Tuple[str, float]], began_s: float) -> None:
        """Add consecutive steps (name, seconds) of the start, the first of which began at `began_s`."""
        for name, seconds in steps if self.is_on else ():
            self.add(name, "start", began_s, began_s + seconds)
            began_s += seconds

    def take(self, with_open: bool = False) -> Tuple[Tuple[Span, ...], int]:
        """Return and forget the spans that ended, and the number of dropped ones.

        `with_open`: also return those that have not ended, as if they ended now.
        """
        spans, self._spans = self._spans, []
        dropped, self._dropped = self._dropped, 0
        if with_open:
            open_ones, self._open = dict(self._open), {}
            now_s = time.monotonic()
            spans += [Span(*each[:3], now_s, each[3]) for each in open_ones.values()]
        return tuple(spans), dropped

    def begin(self, key: int, name: str, category: str) -> None:
        """Note that a span has begun in the current thread."""
        self._open[key] = name, category, time.monotonic(), threading.current_thread().name

    def end(self, key: int) -> None:
        """Add the span that began as `key`, unless it was taken."""
        found = self._open.pop(key, None)
        if found is not None:
            name, category, began_s, thread = found
            self._append(Span(name, category, began_s, time.monotonic(), thread))

    def _append(self, span: Span) -> None:
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1


class _Measured(ContextManager[None]):
    __slots__ = ("_category", "_name")

    def __init__(self, name: str, category: str) -> None:
        self._name, self._category = name, category

    def __enter__(self) -> None:
        recorder.begin(id(self), self._name, self._category)

    def __exit__(self, *_: object) -> None:
        recorder.end(id(self))


recorder = SpanRecorder()
_NOTHING: ContextManager[None] = contextlib.nullcontext()


def measured(name: str, category: str) -> ContextManager[None]:
    """Record the block as a span of the current thread, if the recorder is on when it begins."""
    return _Measured(name, category) if recorder.is_on else _NOTHING
