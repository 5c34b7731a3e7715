"""Process sets: the sets of ranks that run collectives together, each with an engine and connections of its own.

Set 0 is `global_process_set`, with all ranks. Sets are registered by all ranks together: by `init(process_sets=...)`,
or by `add_process_set` if HOROVOD_DYNAMIC_PROCESS_SETS=1 was set or `init(process_sets="dynamic")` was called.
"""

from __future__ import annotations

import collections.abc
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Union

from _pod import wires

from horovod.common.exceptions import HorovodInternalError
from horovod.torch._engine import SHUT_DOWN, Engine, Numbering, Timeline
from horovod.torch._operations import Barrier

GROUP = "horovod"  # of all ranks, and the beginning of the names of the others
_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_UNKNOWN = "Process set does not exist or has not been registered."
_REMOVED = "the process set has been removed"


class _Registered(NamedTuple):
    ranks: List[int]
    group: str  # the name of its connections
    engine: Optional[Engine]  # None if this process does not belong to the set


class _Table:
    """The process sets that are in use, by id. The ids are equal on all ranks, which add and remove in one order."""

    def __init__(self, rank: int, size: int, is_dynamic: bool, timeline: Timeline) -> None:
        self.rank, self.is_dynamic = rank, is_dynamic
        self._timeline = timeline
        self._numbering = Numbering()
        self._free_ids: List[int] = []
        self._registered: Dict[int, _Registered] = {}
        self._register(list(range(size)), GROUP)

    def get(self, process_set_id: int) -> _Registered:
        """Return the process set; ValueError if there is none with this id."""
        if process_set_id not in self._registered:
            raise ValueError(_UNKNOWN)
        return self._registered[process_set_id]

    def contains(self, process_set_id: int) -> bool:
        """Return whether a process set has this id."""
        return process_set_id in self._registered

    def id_of(self, ranks: List[int]) -> Optional[int]:
        """Return the id of the process set of these ranks, if there is one."""
        return next((number for number, each in self._registered.items() if each.ranks == ranks), None)

    def add(self, ranks: List[int]) -> int:
        """Register a process set, with all other ranks, and return its id."""
        self._meet(f"add_process_set {ranks}")
        # With the ranks in its name, all members have joined the group equally often (`wires` counts that).
        return self._register(ranks, f"{GROUP} {','.join(map(str, ranks))}")

    def remove(self, process_set_id: int) -> None:
        """Remove a process set, with all other ranks. Its pending operations fail."""
        self._meet(f"remove_process_set {process_set_id}")
        self._close(self._registered.pop(process_set_id), _REMOVED)
        self._free_ids.append(process_set_id)

    def close(self) -> None:
        """End all engines, the global one last."""
        for number in sorted(self._registered, reverse=True):
            self._close(self._registered.pop(number), SHUT_DOWN)

    def _register(self, ranks: List[int], group: str) -> int:
        engine = None
        number = self._free_ids.pop(0) if self._free_ids else len(self._registered)
        if self.rank in ranks:
            connected = wires.connect(group, ranks.index(self.rank), len(ranks))
            engine = Engine(connected, number, ranks, self._numbering, self._timeline)
        self._registered[number] = _Registered(ranks, group, engine)
        return number

    def _meet(self, what: str) -> None:
        """Wait for all ranks; HorovodInternalError if one of them waits for something else."""
        engine = self._registered[0].engine
        assert engine is not None, "all processes belong to set 0"
        engine.wait(engine.submit(Barrier, what, "all ranks"))

    @staticmethod
    def _close(registered: _Registered, reason: str) -> None:
        if registered.engine is not None:
            registered.engine.close(reason)
            wires.disconnect(registered.group)


_table: Optional[_Table] = None


def start(rank: int, size: int, is_dynamic: bool, timeline: Timeline) -> None:
    """Connect all ranks and start the engine of the global process set; no effect if it runs."""
    global _table
    if _table is None:
        _table = _Table(rank, size, is_dynamic, timeline)
        global_process_set.ranks = list(range(size))


def stop() -> None:
    """End the engines of all process sets. Idempotent; must be called before the process ends."""
    global _table
    table, _table = _table, None
    if table is not None:
        table.close()


def _initialized() -> _Table:
    if _table is None:
        raise ValueError(_NOT_INITIALIZED)
    return _table


class ProcessSet:
    """A set of ranks, to be passed to `init` or `add_process_set`, and then to collectives."""

    process_set_id: Optional[int] = None  # None: not in use
    ranks: Optional[List[int]] = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Raise ValueError unless all elements are integers."""
        if not isinstance(ranks_or_comm, collections.abc.Iterable):
            raise ValueError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but Horovod has not been built"
                " with MPI support."
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object; got"
                f" {ranks_or_comm!r}"
            )
        self.ranks = ranks

    def size(self) -> Optional[int]:
        """Return the number of ranks; None if the set is not in use, ValueError before `init`."""
        return None if self.process_set_id is None else len(_initialized().get(self.process_set_id).ranks)

    def rank(self) -> Optional[int]:
        """Return this process's index in the set; None if the set is not in use.

        Raises:
            ValueError: this process does not belong to the set, or Horovod is not initialized.
        """
        if self.process_set_id is None:
            return None
        table = _initialized()
        ranks = table.get(self.process_set_id).ranks
        if table.rank not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(table.rank)

    def included(self) -> Optional[bool]:
        """Return whether this process belongs to the set; None if it has no ranks, ValueError before `init`."""
        return None if self.ranks is None else _initialized().rank in self.ranks

    def __str__(self) -> str:
        """Return Horovod's text."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Register a process set and return it. All ranks must call it, with the same ranks.

    Raises:
        HorovodInternalError: the ranks do not all call it with the same ranks.
        ValueError: a set with these ranks exists, a rank does not exist, or sets cannot be added after `init`.
    """
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    table = _initialized()
    if not table.is_dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets after Horovod initialization."
        )
    ranks = checked_ranks(process_set, len(table.get(0).ranks))
    if table.id_of(ranks) is not None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    register(process_set, ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set and return whether it was in use; the global one stays. All ranks must call it.

    Raises:
        HorovodInternalError: the ranks do not all remove the same set.
        ValueError: sets cannot be removed after `init`.
    """
    number = process_set.process_set_id
    if not number:
        return False  # not in use, or the global one
    process_set.process_set_id = None
    table = _initialized()
    if not table.is_dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing process sets after Horovod initialization."
        )
    if not table.contains(number):
        return False
    table.remove(number)
    return True


def register(process_set: ProcessSet, ranks: List[int]) -> None:
    """Register a process set, with all other ranks. `ranks` are its checked ranks."""
    process_set.process_set_id = _initialized().add(ranks)


def checked_ranks(process_set: ProcessSet, size: int) -> List[int]:
    """Return the ranks of a set, all of them for an empty one; ValueError if a rank is invalid or occurs twice."""
    ranks = sorted(process_set.ranks or range(size))
    for rank in ranks:
        if not 0 <= rank < size:
            raise ValueError(f"Tried to register process set with invalid rank: {rank}")
        if ranks.count(rank) > 1:
            raise ValueError(f"Tried to register process set with duplicate rank: {rank}")
    return ranks


def engine_of(process_set: ProcessSet, operation: str) -> Engine:
    """Return the engine that runs the collectives of a process set here.

    Raises:
        HorovodInternalError: Horovod is not initialized.
        ValueError: the process set is not in use, or this process does not belong to it; names the operation.
    """
    if _table is None:
        raise HorovodInternalError(_NOT_INITIALIZED)
    number = process_set.process_set_id
    if number is None or not _table.contains(number):
        raise ValueError(
            f"{operation.capitalize()}: Process set provided does not exist, or has not been registered. {process_set}"
        )
    engine = _table.get(number).engine
    if engine is None:
        raise ValueError(
            f"{operation.capitalize()}: Rank {_table.rank} is not a member of the provided process set. {process_set}"
        )
    return engine


def ids_and_ranks() -> Dict[int, List[int]]:
    """Return the ranks of all process sets by id; ValueError before `init`."""
    return {number: each.ranks for number, each in _initialized()._registered.items()}


def _reset_in_forked_child() -> None:
    """A child has no engine threads, and the connections belong to its parent."""
    global _table
    _table = None


os.register_at_fork(after_in_child=_reset_in_forked_child)
