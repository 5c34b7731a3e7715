"""Horovod's environment variables: how they are read, and a warning that names those without effect here."""

from __future__ import annotations

import os
import re
import warnings

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
