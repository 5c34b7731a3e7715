"""Process sets (contract section 8): the emulated Horovod has the one of all ranks only."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Union

from horovod.torch import _identity

_REFUSAL = "the emulated Horovod has one process set only, hvd.global_process_set"


class ProcessSet:
    """Ranks that work together. Others than `global_process_set` can be described here, but not used."""

    process_set_id: Optional[int] = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        """ValueError for anything but ranks."""
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of ranks, which are whole numbers; got {ranks_or_comm!r}")
        self._ranks = ranks

    @property
    def ranks(self) -> Optional[List[int]]:
        """Its ranks in order."""
        is_global = self.process_set_id == 0
        return list(range(_identity.size())) if is_global and _identity.is_known() else self._ranks

    def size(self) -> Optional[int]:
        """Number of its ranks; None if it is not in use, ValueError before `init`."""
        return None if self.process_set_id is None else _identity.size()

    def rank(self) -> Optional[int]:
        """This process's place in it; None if it is not in use, ValueError before `init`."""
        return None if self.process_set_id is None else _identity.rank()

    def included(self) -> Optional[bool]:
        """Whether this process belongs to it; ValueError before `init`."""
        return _identity.rank() in (self.ranks or [])

    def __str__(self) -> str:
        """As Horovod writes it."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Refused with NotImplementedError."""
    raise NotImplementedError(f"{_REFUSAL}; {process_set} cannot be added")


def remove_process_set(process_set: ProcessSet) -> bool:
    """False: the process set of all ranks stays, and there is no other."""
    return False


def check(process_set: Any) -> None:
    """NotImplementedError for any process set but `global_process_set`."""
    if process_set is not global_process_set:
        raise NotImplementedError(f"{_REFUSAL}; got {process_set}")
