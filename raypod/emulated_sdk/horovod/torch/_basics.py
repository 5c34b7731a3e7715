"""Initialization, the position of this rank, build queries and process sets.

Rank and size come from HOROVOD_RANK and HOROVOD_SIZE, else from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, else
from popdist (instances), else they are 0 and 1. The build queries describe a Horovod with Gloo only.
"""

from __future__ import annotations

import atexit
import os
import warnings
from typing import Any, List, NamedTuple, Optional, Sequence, Union

import popdist
from _pod import wires

from horovod.torch import _engine

__all__ = [
    "ProcessSet",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_GROUP = "horovod"


class Position(NamedTuple):
    """A rank among all, among those of its host, and among those with its local rank on all hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


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
        _position = _determine_position()
    _engine.start(wires.connect(_GROUP, _position.rank, _position.size))


def shutdown() -> None:
    """Disconnect from the other ranks, whose later collectives fail. `init` may be called again."""
    global _position
    _engine.stop()
    wires.disconnect(_GROUP)
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


def _determine_position() -> Position:
    """Read the environment, and join all ranks to exchange their local ranks."""
    own_rank, own_size, own_local = _variable("RANK"), _variable("SIZE"), _variable("LOCAL_RANK")
    if own_rank is None or own_size is None:
        own_rank, own_size = popdist.getInstanceIndex(), popdist.getNumInstances()
        own_local = popdist.getLocalInstanceIndex() if own_local is None else own_local
    own_local = own_rank if own_local is None else own_local
    group = wires.connect(_GROUP, own_rank, own_size)
    position = _position_among(own_rank, [number for row in group.gather_numbers([own_local]) for number in row])
    given = {field: _variable(field.upper()) for field in ("local_size", "cross_rank", "cross_size")}
    return position._replace(**{field: number for field, number in given.items() if number is not None})


def _position_among(own_rank: int, local_ranks: List[int]) -> Position:
    """Derive the hosts from all local ranks: ranks are numbered host by host, so local rank 0 begins a new host."""
    hosts: List[int] = []
    for local in local_ranks:
        hosts.append((hosts[-1] if hosts else -1) + (local == 0))
    own_local, own_host = local_ranks[own_rank], hosts[own_rank]
    across = [host for host, local in zip(hosts, local_ranks) if local == own_local]
    return Position(
        own_rank, len(hosts), own_local, hosts.count(own_host), sum(host < own_host for host in across), len(across)
    )


def _variable(name: str) -> Optional[int]:
    """Return HOROVOD_<name>, else Open MPI's variable of the same meaning, else None."""
    for variable in (f"HOROVOD_{name}", f"OMPI_COMM_WORLD_{name}"):
        text = os.environ.get(variable)
        if text is not None:
            if not text.isdigit():
                raise RuntimeError(f"{variable}={text!r} is not a non-negative integer")
            return int(text)
    return None


def mpi_built() -> bool:
    """Return False."""
    return False


def mpi_enabled() -> bool:
    """Return False."""
    return False


def mpi_threads_supported() -> bool:
    """Raise ValueError, as Horovod does without MPI."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def gloo_built() -> bool:
    """Return True: the emulated collectives use Gloo."""
    return True


def gloo_enabled() -> bool:
    """Return True."""
    return True


def nccl_built() -> int:
    """Return 0: there is no NCCL."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False


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
