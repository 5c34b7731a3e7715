"""What an instance is doing, and since when: noted by the thread that does it, read by another that still answers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Iterator, List, Optional, TypeVar

from raypod.events import Beat

_Item = TypeVar("_Item")

IDLE = "waiting for its next order"
LOADING = "loading data"
# Frames by which a stack is known to wait for other instances: the emulated SDK's wires, and Horovod's.
_WIRES = (
    "/_pod/wires.py",
    "/_pod/rendezvous.py",
    "/_pod/store_",
    "/_pod/board.py",
    "/horovod/torch/",
)


class Pulse:
    """Of one instance; its work is noted by one thread only."""

    def __init__(self, instance: int) -> None:
        self._instance = instance
        self._now = (IDLE, time.monotonic())  # one value: read by another thread
        self._calls: List[float] = []  # the first call's seconds, and the slowest later one's
        self._calls_done = 0
        self._thread: Optional[int] = None

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Inside, the instance does this; before and afterwards what it did."""
        before = self._now[0]
        self._thread = threading.get_ident()
        self._now = (what, time.monotonic())
        try:
            yield
        finally:
            self._now = (before, time.monotonic())

    @contextlib.contextmanager
    def in_call(self, number: int) -> Iterator[None]:
        """Inside, call `number` (0-based) runs."""
        began = time.monotonic()
        with self.doing(f"in call {number + 1}"):
            yield
        seconds = time.monotonic() - began
        self._calls_done += 1
        # The first one compiles, and says nothing about the others.
        self._calls = [seconds] if not self._calls else [self._calls[0], max([seconds, *self._calls[1:]])]

    def loading(self, batches: Iterator[_Item]) -> Iterator[_Item]:
        """The same items; while one is waited for, the instance loads data."""
        with contextlib.ExitStack() as stack:
            close = getattr(batches, "close", None)  # generators have it: what they started ends with this one
            if close is not None:
                stack.callback(close)
            while True:
                with self.doing(LOADING):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                yield batch

    def beat(self) -> Beat:
        """The record for whoever asks; from any thread."""
        doing, since_s = self._now
        slowest = self._calls[-1] if self._calls else None
        return Beat(
            self._instance, doing, time.monotonic() - since_s, self._calls_done, slowest, self.waits_for_others()
        )

    def stack(self) -> str:
        """Where the working thread is, as a traceback has it; "" before it has worked."""
        frame = self._frame()
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def waits_for_others(self) -> bool:
        """Whether the working thread is inside an exchange with other instances."""
        frame = self._frame()
        while frame is not None:
            if any(sign in frame.f_code.co_filename for sign in _WIRES):
                return True
            frame = frame.f_back
        return False

    def _frame(self) -> Optional[FrameType]:
        return sys._current_frames().get(self._thread) if self._thread is not None else None
