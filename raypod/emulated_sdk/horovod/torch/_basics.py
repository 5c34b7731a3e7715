"""Initialization, the position of this rank, the timeline and process sets."""

from __future__ import annotations

import atexit
import os
import warnings
from typing import Any, List, Optional, Sequence, Union

from _pod import wires

from horovod.torch import _engine
from horovod.torch._position import GROUP, Position, determine_position

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_position: Optional[Position] = None


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join all other ranks; no effect if already initialized. All ranks must call it.

    Raises:
        NotImplementedError: `comm` or `process_sets` selects a part of the ranks.
        RuntimeError: an environment variable is invalid, or a rank (named) has not joined in time.
    """
    global _position
    if comm or (process_sets and process_sets != "dynamic"):
        raise NotImplementedError("the emulated Horovod supports all ranks only: omit comm and process_sets")
    if _position is None:
        _position = determine_position()
    _engine.start(wires.connect(GROUP, _position.rank, _position.size))


def shutdown() -> None:
    """Disconnect from the other ranks, whose later collectives fail. `init` may be called again."""
    global _position
    _engine.stop()
    wires.disconnect(GROUP)
    _position = None


atexit.register(shutdown)  # registered after `wires.close`, so that it runs before


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not called since."""
    return _position is not None


def _initialized() -> Position:
    if _position is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _position


def rank() -> int:
    """Return this process's rank; ValueError before `init`, like the following functions."""
    return _initialized().rank


def size() -> int:
    """Return the number of ranks."""
    return _initialized().size


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    return _initialized().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _initialized().local_size


def cross_rank() -> int:
    """Return the index of this host among the hosts that have a rank with this local rank."""
    return _initialized().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return _initialized().cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks, as far as this host's number shows."""
    position = _initialized()
    return position.local_size * position.cross_size == position.size


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Warn that no timeline is written.

    Raises:
        ValueError: before `init`, or without HOROVOD_TIMELINE=DYNAMIC.
    """
    _initialized()
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    warnings.warn(f"the emulated Horovod writes no timeline; {file_path} is not created", stacklevel=2)


def stop_timeline() -> None:
    """Do nothing; ValueError before `init`."""
    _initialized()


_ONE_PROCESS_SET = "the emulated Horovod has one process set only, hvd.global_process_set"


class ProcessSet:
    """A set of ranks. Sets other than `global_process_set` can be created, but not used."""

    process_set_id: Optional[int] = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """Raise ValueError unless all elements are integers."""
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet takes ranks, which are integers; got {ranks_or_comm!r}")
        self._ranks = ranks

    @property
    def ranks(self) -> Optional[List[int]]:
        """The ranks, sorted."""
        return list(range(size())) if self.process_set_id == 0 and is_initialized() else self._ranks

    def size(self) -> Optional[int]:
        """Return the number of ranks; None if the set is not in use, ValueError before `init`."""
        return None if self.process_set_id is None else size()

    def rank(self) -> Optional[int]:
        """Return this process's rank in the set; None if the set is not in use, ValueError before `init`."""
        return None if self.process_set_id is None else rank()

    def included(self) -> Optional[bool]:
        """Return whether this process belongs to the set; ValueError before `init`."""
        return rank() in (self.ranks or [])

    def __str__(self) -> str:
        """Return Horovod's text."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Raise NotImplementedError."""
    raise NotImplementedError(f"{_ONE_PROCESS_SET}; {process_set} cannot be added")


def remove_process_set(process_set: ProcessSet) -> bool:
    """Return False: `global_process_set` cannot be removed, and there is no other."""
    return False


def check_process_set(process_set: Any) -> None:
    """Raise NotImplementedError for any process set except `global_process_set`."""
    if process_set is not global_process_set:
        raise NotImplementedError(f"{_ONE_PROCESS_SET}; got {process_set}")
