"""Horovod's environment variables: those without effect here are named by a warning."""

from __future__ import annotations

import os
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
    "it has no elastic mode": "ELASTIC",
}
_ONLY_GLOO = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")


def is_set(name: str) -> bool:
    """Return whether a variable holds a number other than 0; RuntimeError if it does not hold a number."""
    text = os.environ.get(name, "0")
    if not text.isdigit():
        raise RuntimeError(f"{name}={text!r} is not a non-negative integer")
    return int(text) != 0


def warn_of_ignored() -> None:
    """Warn of the variables that are set and have no effect."""
    for reason, names in _NO_EFFECT.items():
        ignored = [f"HOROVOD_{name}" for name in names.split() if os.environ.get(f"HOROVOD_{name}")]
        if ignored:
            warnings.warn(f"the emulated Horovod ignores {', '.join(ignored)}: {reason}", stacklevel=3)
    for name in _ONLY_GLOO:
        value = os.environ.get(name, "gloo")
        if value.lower() != "gloo":
            warnings.warn(f"the emulated Horovod ignores {name}={value}: it uses Gloo", stacklevel=3)
