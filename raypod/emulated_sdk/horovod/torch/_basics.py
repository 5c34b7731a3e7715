"""Initialization, the position of this rank, the timeline, and the environment variables without effect here.

Rank and size come from HOROVOD_RANK and HOROVOD_SIZE, else from OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE, else
from popdist (instances), else they are 0 and 1.
"""

from __future__ import annotations

import atexit
import os
import re
import warnings
from typing import Any, Iterable, List, NamedTuple, Optional, Tuple, Union

import popdist
from _pod import wires

from horovod.torch import _process_sets
from horovod.torch._engine import Timeline
from horovod.torch._process_sets import GROUP, ProcessSet, add_process_set, global_process_set, remove_process_set
from horovod.torch._process_sets import ids_and_ranks as _get_process_set_ids_and_ranks  # noqa: F401  # Horovod's tests

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
    is_dynamic = variable_as_number("HOROVOD_DYNAMIC_PROCESS_SETS") != 0
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
                _timeline.start(timeline, variable_as_number("HOROVOD_TIMELINE_MARK_CYCLES") > 0)
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


def variable_as_number(name: str) -> int:
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
            clauses.append(f"{name}={values[name]!r} (not a number: it counts as {variable_as_number(name)})")
    if clauses:
        warnings.warn(f"the emulated Horovod ignores {'; '.join(clauses)}", stacklevel=3)
