"""Initialization, the position of this rank and the timeline."""

from __future__ import annotations

import atexit
import os
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

from _pod import wires

from horovod.torch import _process_sets
from horovod.torch._position import GROUP, Position, determine_position, number, warn_of_ignored
from horovod.torch._process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.torch._timeline import Timeline

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
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
_timeline = Timeline()


def init(comm: Any = None, process_sets: Union[None, str, Iterable[ProcessSet]] = None) -> None:
    """Join all other ranks; no effect if already initialized. All ranks must call it.

    Args:
        process_sets: the process sets to register, the same on all ranks, besides `global_process_set`; or "dynamic",
            which allows `add_process_set` and `remove_process_set` as HOROVOD_DYNAMIC_PROCESS_SETS=1 does.

    Raises:
        NotImplementedError: `comm` selects a part of the ranks.
        RuntimeError: an environment variable is invalid, or a rank (named) has not joined in time.
        ValueError: a process set is invalid or a duplicate; `comm` is no list of ranks.
    """
    global _position
    _check_comm(comm)
    if _position is not None:
        return
    is_dynamic = number("HOROVOD_DYNAMIC_PROCESS_SETS") != 0
    if isinstance(process_sets, str):
        is_dynamic = is_dynamic or process_sets.lower() == "dynamic"
        process_sets = None
    checked: List[Tuple[ProcessSet, List[int]]] = []
    try:
        position = determine_position()
        checked = _checked_sets(list(process_sets or []), position.size)
        if position.rank == 0:
            warn_of_ignored()
            timeline = os.environ.get("HOROVOD_TIMELINE", "")
            if timeline not in ("", "DYNAMIC"):
                _timeline.start(timeline, number("HOROVOD_TIMELINE_MARK_CYCLES") > 0)
        _process_sets.start(position.rank, position.size, is_dynamic, _timeline)
        for process_set, ranks in checked:
            _process_sets.register(process_set, ranks)
        _position = position
    finally:
        if _position is None:
            shutdown()
            for process_set, _ in checked:
                process_set.process_set_id = None


def _check_comm(comm: Any) -> None:
    if comm is None or (isinstance(comm, (list, tuple, range)) and not comm):
        return
    if not isinstance(comm, (list, tuple, range)):
        raise ValueError("Horovod has not been built with MPI support: comm is a list of ranks")
    raise NotImplementedError("the emulated Horovod joins all ranks: omit comm, and use process sets")


def _checked_sets(process_sets: List[ProcessSet], size: int) -> List[Tuple[ProcessSet, List[int]]]:
    """Return the sets with their ranks; ValueError if one is invalid or has the ranks of another one."""
    checked: List[Tuple[ProcessSet, List[int]]] = []
    seen = [list(range(size))]
    for index, process_set in enumerate(process_sets):
        ranks = _process_sets.checked_ranks(process_set, size)
        if ranks in seen:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {index} is a duplicate:"
                f" {process_set}"
            )
        seen.append(ranks)
        checked.append((process_set, ranks))
    return checked


def shutdown() -> None:
    """Disconnect from the other ranks, whose later collectives fail. `init` may be called again."""
    global _position
    _process_sets.stop()
    wires.disconnect(GROUP)  # `init` may fail after it has connected
    _timeline.stop()
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
    """Write a timeline of the operations to a new file, on rank 0; no effect while one is being written.

    A warning if the file cannot be opened; ValueError before `init`, or without HOROVOD_TIMELINE=DYNAMIC.
    """
    position = _initialized()
    if os.environ.get("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
    if position.rank == 0:
        _timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Close the file of the timeline; ValueError before `init`."""
    _initialized()
    _timeline.stop()


def _get_process_set_ids_and_ranks() -> Dict[int, List[int]]:
    """Return the ranks of all process sets by id, under the name that Horovod's own tests use."""
    return _process_sets.ids_and_ranks()
