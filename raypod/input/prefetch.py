"""What is prepared while a call runs, and how long a call waited for it nevertheless."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Deque, Generator, Iterator, Tuple, TypeVar

Item = TypeVar("Item")
Request = TypeVar("Request")
_GRACE_S = 1.0  # for the batch that is being made when nobody wants another one


def timed(batches: Iterator[Item]) -> Iterator[Tuple[Item, float]]:
    """Each batch, and the seconds that whoever asked for it waited."""
    with contextlib.ExitStack() as stack:
        close = getattr(batches, "close", None)  # generators have it: what they started ends with this one
        if close is not None:
            stack.callback(close)
        while True:
            asked_s = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch, time.monotonic() - asked_s


def prepared(
    make: Callable[[Request], Item], requests: Iterator[Request], workers: int, depth: int
) -> Generator[Item, None, None]:
    """What `make` gives for each request, in their order, `depth` of them ahead of the one that is asked for.

    `workers` threads make them, so `make` should spend its time outside of the interpreter lock. An error in it
    surfaces here, in its place.
    """
    pending: Deque[Future[Item]] = collections.deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="feed") as pool:
        try:
            for request in requests:
                pending.append(pool.submit(make, request))
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def ahead(batches: Iterator[Item], depth: int, interrupt: Callable[[], None]) -> Iterator[Item]:
    """The same batches, up to `depth` of them prepared in a thread; an error there surfaces here, in its place.

    A batch that is still being made when nobody wants another one is interrupted, and the thread ends by itself.
    """
    slots: queue.Queue[Any] = queue.Queue(maxsize=depth)
    ended = threading.Event()

    def put(item: Any) -> bool:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                slots.put(item, timeout=0.1)
                return True
        return False

    def fill() -> None:
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
            put((None, None))
        except BaseException as error:  # noqa: BLE001 - handed over to the consumer, who raises it
            put((None, error))

    thread = threading.Thread(target=fill, name="feed-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = slots.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        ended.set()
        _end(thread, interrupt)


def _end(thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    thread.join(_GRACE_S)
    if thread.is_alive():
        interrupt()
