"""The position of this process among all ranks.

Rank and size come from HOROVOD_RANK and HOROVOD_SIZE, else from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, else
from popdist (instances), else they are 0 and 1.
"""

from __future__ import annotations

import os
from typing import List, NamedTuple, Optional

import popdist
from _pod import wires

GROUP = "horovod"


class Position(NamedTuple):
    """A rank among all, among those of its host, and among those with its local rank on all hosts."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def determine_position() -> Position:
    """Read the environment, and join all ranks to exchange their local ranks."""
    own_rank, own_size, own_local = _variable("RANK"), _variable("SIZE"), _variable("LOCAL_RANK")
    if own_rank is None or own_size is None:
        own_rank, own_size = popdist.getInstanceIndex(), popdist.getNumInstances()
        own_local = popdist.getLocalInstanceIndex() if own_local is None else own_local
    own_local = own_rank if own_local is None else own_local
    group = wires.connect(GROUP, own_rank, own_size)
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
