"""Who this rank is, and its wires to the others: Horovod's basics (contract section 8).

Rank and size come from HOROVOD_RANK/HOROVOD_SIZE, else from OMPI_COMM_WORLD_RANK/_SIZE, else from popdist
(instances), else they are 0 and 1.
"""

from __future__ import annotations

import os
from typing import List, NamedTuple, Optional

import _emulated_pod
import popdist

_GROUP = "horovod"


class Identity(NamedTuple):
    """A rank's place: among all, among those of its host, and among those with its local rank on all hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


_identity: Optional[Identity] = None


def find() -> None:
    """Joins all other ranks and finds out this one's place; without effect if done before."""
    global _identity
    if _identity is None:
        _identity = _find_identity()


def forget() -> None:
    """Leaves the others."""
    global _identity
    _emulated_pod.disconnect(_GROUP)
    _identity = None


def is_known() -> bool:
    """Whether `find` has been called, and `forget` not since."""
    return _identity is not None


def identity() -> Identity:
    """This rank's place; ValueError before `init`."""
    if _identity is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _identity


def group() -> _emulated_pod.Group:
    """The wires to the other ranks; ValueError before `init`. Only the engine uses them once it runs."""
    who = identity()
    return _emulated_pod.connect(_GROUP, who.rank, who.size)


def rank() -> int:
    """This rank among all; ValueError before `init`, as all below."""
    return identity().rank


def size() -> int:
    """Number of ranks."""
    return identity().size


def local_rank() -> int:
    """This rank among those of its host."""
    return identity().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return identity().local_size


def cross_rank() -> int:
    """Index of this host among those that have a rank with this local rank."""
    return identity().cross_rank


def cross_size() -> int:
    """Number of hosts that have a rank with this local rank."""
    return identity().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks, as far as this rank can tell from its own host."""
    who = identity()
    return who.local_size * who.cross_size == who.size


def _find_identity() -> Identity:
    own_rank, own_size = _variable("RANK"), _variable("SIZE")
    own_local = _variable("LOCAL_RANK")
    if own_rank is None or own_size is None:
        own_rank, own_size = popdist.getInstanceIndex(), popdist.getNumInstances()
        own_local = popdist.getLocalInstanceIndex() if own_local is None else own_local
    own_local = own_rank if own_local is None else own_local
    wires = _emulated_pod.connect(_GROUP, own_rank, own_size)
    local_ranks = [number for row in wires.gather_numbers([own_local]) for number in row]
    found = _placed(own_rank, local_ranks)
    told = {field: _variable(field.upper()) for field in ("local_size", "cross_rank", "cross_size")}
    return found._replace(**{field: number for field, number in told.items() if number is not None})


def _placed(own_rank: int, local_ranks: List[int]) -> Identity:
    """Works out the hosts from everyone's local rank: ranks fill host after host, so local rank 0 begins a new one."""
    hosts: List[int] = []
    for local in local_ranks:
        hosts.append((hosts[-1] if hosts else -1) + (local == 0))
    own_local, own_host = local_ranks[own_rank], hosts[own_rank]
    across = [host for host, local in zip(hosts, local_ranks) if local == own_local]
    return Identity(
        own_rank, len(hosts), own_local, hosts.count(own_host), sum(host < own_host for host in across), len(across)
    )


def _variable(name: str) -> Optional[int]:
    """HOROVOD_<name>, else Open MPI's variable of the same meaning, else None."""
    for variable in (f"HOROVOD_{name}", f"OMPI_COMM_WORLD_{name}"):
        text = os.environ.get(variable)
        if text is not None:
            if not text.isdigit():
                raise RuntimeError(f"{variable}={text!r} is not a whole number")
            return int(text)
    return None
