"""Door `activation`: which SDK this process imports, and the settings of the emulated SDK.

The settings are environment variables, so that they reach the programs that a launcher starts. The Poplar SDK ignores
them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Optional

FOLDER = str(Path(__file__).resolve().parent.parent)  # on PYTHONPATH it makes the emulated SDK importable
RENDEZVOUS, SECRET = "EMULATED_POD_RENDEZVOUS", "EMULATED_POD_SECRET"
GENERATION, TIMEOUT_S = "EMULATED_POD_GENERATION", "EMULATED_POD_TIMEOUT_S"
HOROVOD = "EMULATED_POD_HOROVOD"
STRICT = "EMULATED_POD_STRICT"
MEMORY_FORMAT = "EMULATED_POD_MEMORY_FORMAT"
COMPILE = "EMULATED_POD_COMPILE"
CALL_S, LOAD_S = "EMULATED_POD_CALL_S", "EMULATED_POD_LOAD_S"
REPLICAS_AT_A_TIME, REPLICA_CPUS = "EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"
IPUS = "EMULATED_POD_IPUS"
FINDINGS = "EMULATED_POD_FINDINGS"

_FIRST_THAT_COMPILES = (2, 1)  # of torch

_is_fallback = False


def activate(is_fallback: bool = False) -> None:
    """Make the emulated SDK importable in this process.

    Args:
        is_fallback: only what is not installed, so with the Poplar SDK its Horovod where there is none. Without it, the
            emulated SDK comes before an installed one.
    """
    global _is_fallback
    _is_fallback = is_fallback
    sys.path[:] = path_without()
    sys.path.insert(len(sys.path) if is_fallback else 0, FOLDER)


def path_without() -> List[str]:
    """Return `sys.path` without the emulated SDK."""
    return [entry for entry in sys.path if entry != FOLDER]


def is_fallback() -> bool:
    """Return whether `activate` has left PopTorch to the Poplar SDK."""
    return _is_fallback


def is_strict() -> bool:
    """Return whether strict mode is on: its variable is set, and neither empty nor 0."""
    return os.environ.get(STRICT, "0") not in ("", "0")


def requests_memory_format() -> bool:
    """Return whether the environment sets the memory format of convolutions."""
    return os.environ.get(MEMORY_FORMAT, "auto") not in ("", "auto")


def requests_compilation() -> bool:
    """Return whether the environment requests that torch.compile compiles training programs.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(COMPILE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{COMPILE}={value!r}: must be 0 or 1")
    return value == "1"


def missing_for_compilation() -> str:
    """Return what this host lacks to compile training programs, in words; "" if nothing. Imports no torch."""
    from importlib import metadata  # only here: most processes need none of its imports

    version = metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < _FIRST_THAT_COMPILES:
        return f"{COMPILE}=1 needs torch 2.1 or later, and this is {version}"
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"{COMPILE}=1 needs a C++ compiler, and there is no {compiler}: install it, or set CXX"
    return ""


def holds_interpreter_lock() -> bool:
    """Return whether the emulation holds the interpreter lock in a call or a load, as the Poplar SDK always does."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in (CALL_S, LOAD_S))


def settings(
    *,
    strict: Optional[bool] = None,
    memory_format: Optional[str] = None,
    timeout_s: Optional[float] = None,
    emulated_horovod: bool = False,
    replicas_at_a_time: Optional[int] = None,
    replica_cpus: Optional[List[List[int]]] = None,
    ipus: Optional[str] = None,
    findings: Optional[str] = None,
) -> Dict[str, str]:
    """Return settings as environment variables; one that is None keeps the inherited value.

    Args:
        strict: what an IPU rejects is an error.
        memory_format: `auto`, `contiguous` or `channels_last`.
        timeout_s: of every wait for another process.
        emulated_horovod: ignore an installed Horovod.
        replicas_at_a_time: how many replicas of a process compute at the same time.
        replica_cpus: the CPUs of each thread in which replicas run.
        ipus: the number of IPUs that the SDK reports.
        findings: the file for what an IPU would reject, in a program that ends after its first call.
    """
    cpus = None if replica_cpus is None else ";".join(",".join(map(str, each)) for each in replica_cpus)
    values = {
        STRICT: None if strict is None else int(strict),
        MEMORY_FORMAT: memory_format,
        TIMEOUT_S: timeout_s,
        HOROVOD: "emulated" if emulated_horovod else None,
        REPLICAS_AT_A_TIME: replicas_at_a_time,
        REPLICA_CPUS: cpus,
        IPUS: ipus,
        FINDINGS: findings,
    }
    return {name: str(value) for name, value in values.items() if value is not None}
