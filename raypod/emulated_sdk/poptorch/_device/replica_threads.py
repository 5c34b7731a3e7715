"""Runs the replicas of a process side by side, as many as there are cores, with its intra-op threads in each."""

from __future__ import annotations

import contextvars
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, List, Optional

import torch
from torch.overrides import _get_current_function_mode_stack


class ReplicaThreads:
    """A thread per replica, no more than cores; a single replica works in the caller's thread."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._pool: Optional[ThreadPoolExecutor] = None
        if replicas > 1:
            # A new thread takes torch's count only at its first parallel region, after oneDNN may have asked OpenMP.
            self._pool = ThreadPoolExecutor(
                max_workers=min(replicas, _cores()),  # more would take the caches from each other
                thread_name_prefix="replica",
                initializer=torch.set_num_threads,
                initargs=(torch.get_num_threads(),),
            )
            weakref.finalize(self, self._pool.shutdown, wait=False)

    def each(self, work: Callable[[int], None]) -> None:
        """Run `work(replica)` for every replica; returns when all are done, or raises the first replica's error."""
        if self._pool is None:
            work(0)
            return
        inherited = _CallersState()
        futures: List[Future[None]] = [
            self._pool.submit(contextvars.copy_context().run, inherited.run, work, replica)
            for replica in range(self._replicas)
        ]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: no replica may still be at work when the caller goes on
            for future in futures:
                future.cancel()
            wait(futures)
            raise
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class _CallersState:
    """What torch keeps per thread and a forward can tell: the device must not show in which thread a replica works.

    Autocast and inference mode are off for the device; the grad mode is set by whoever runs a micro-batch.
    """

    def __init__(self) -> None:
        # Such as the default device. The modes are shared as they are: entering them again would change them.
        self._modes: List[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._threads = torch.get_num_threads()

    def run(self, work: Callable[[int], None], replica: int) -> None:
        """`work(replica)` in the present thread as in the caller's."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        for mode in self._modes:
            torch._C._push_on_torch_function_stack(mode)
        try:
            work(replica)
        finally:
            for _ in self._modes:
                torch._C._pop_torch_function_stack()


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
