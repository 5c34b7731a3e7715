"""Runs the replicas of a process side by side, one thread each, with the process's intra-op threads in each."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Callable, List, Optional

import torch


class ReplicaThreads:
    """A thread per replica; a single replica works in the caller's thread."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._pool: Optional[ThreadPoolExecutor] = None
        if replicas > 1:
            # A new thread takes torch's count only at its first parallel region, after oneDNN may have asked OpenMP.
            self._pool = ThreadPoolExecutor(
                max_workers=replicas,
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
        futures: List[Future[None]] = [self._pool.submit(work, replica) for replica in range(self._replicas)]
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
