"""Horovod's environment variables: the position of this process among all ranks, and those without effect here.

Rank and size come from HOROVOD_RANK and HOROVOD_SIZE, else from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, else
from popdist (instances), else they are 0 and 1.
"""

from __future__ import annotations

import os
import re
import warnings
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


_NO_EFFECT = {
    "they tune the transfers of the installed Horovod": (
        "AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
        " AUTOTUNE_GAUSSIAN_PROCESS_NOISE BATCH_D2D_MEMCOPIES CACHE_CAPACITY CYCLE_TIME DISABLE_GROUP_FUSION"
        " ENABLE_ASYNC_COMPLETION FUSION_THRESHOLD HIERARCHICAL_ALLGATHER HIERARCHICAL_ALLREDUCE THREAD_AFFINITY"
        " TORUS_ALLREDUCE"
    ),
    "there are neither MPI nor GPUs": (
        "ADASUM_MPI_CHUNK_SIZE CCL_CACHE DISABLE_NVTX_RANGES ENABLE_XLA_OPS MPI_THREADS_DISABLE NUM_NCCL_STREAMS"
    ),
    "EMULATED_POD_TIMEOUT_S bounds every wait": (
        "GLOO_TIMEOUT_SECONDS STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS"
    ),
    "it writes no log": "LOG_HIDE_TIME LOG_LEVEL LOG_TIMESTAMP LOG_WITHOUT_TIMESTAMP",
    "it has no elastic mode": "ELASTIC ELASTIC_TIMEOUT",
}
# A launcher of pods, recognized by one of `_LAUNCHER`, sets these for an installed Horovod.
_CONNECTION = "GLOO_IFACE GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT HOSTNAME"
_LAUNCHER = ("EMULATED_POD_RENDEZVOUS", "POPDIST_NUM_TOTAL_REPLICAS")
_ONLY_GLOO = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
_NUMBERS = ("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_TIMELINE_MARK_CYCLES")


def number(name: str) -> int:
    """Return the integer at the start of a variable's text, as C's `strtol`: 0 if there is none or it is not set."""
    found = re.match(r"\s*([+-]?[0-9]+)", os.environ.get(name, ""))
    return int(found.group(1)) if found else 0


def warn_of_ignored() -> None:
    """Issue one warning that names the variables that are set and have no effect, or are no numbers."""
    no_effect = dict(_NO_EFFECT)
    if not any(os.environ.get(name) for name in _LAUNCHER):
        no_effect["EMULATED_POD_RENDEZVOUS and GLOO_SOCKET_IFNAME select the connections"] = _CONNECTION
    clauses = []
    for reason, suffixes in no_effect.items():
        names = [f"HOROVOD_{suffix}" for suffix in suffixes.split() if os.environ.get(f"HOROVOD_{suffix}")]
        if names:
            clauses.append(f"{', '.join(names)} ({reason})")
    values = {name: os.environ.get(name, "") for name in _ONLY_GLOO + _NUMBERS}
    clauses += [
        f"{name}={values[name]} (it uses Gloo)" for name in _ONLY_GLOO if values[name].lower() not in ("", "gloo")
    ]
    for name in _NUMBERS:
        if values[name] and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", values[name]):
            clauses.append(f"{name}={values[name]!r} (not a number: it counts as {number(name)})")
    if clauses:
        warnings.warn(f"the emulated Horovod ignores {'; '.join(clauses)}", stacklevel=3)
