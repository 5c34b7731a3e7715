"""The connection between instances: MPI in PopDist, the emulated pod's wires here (contract sections 6.1 and 6.4).

Where the contract is silent [I]: `init` may be called again without effect; calls that concern one instance only need
no `init`.
"""

from __future__ import annotations

import atexit
from typing import Any, Callable, Collection, Optional, TypeVar

import _emulated_pod

from popdist import _environment

_Result = TypeVar("_Result")
_GROUP = "popdist"
_is_initialized = False


def init() -> None:
    """Connects this instance with all others; ends at exit. All instances must call it.

    RuntimeError if an instance does not come in time, which the error names, or if the rendezvous is missing.
    """
    global _is_initialized
    _emulated_pod.connect(_GROUP, _environment.getInstanceIndex(), _environment.getNumInstances())
    _is_initialized = True


def isBackendInitialized() -> bool:
    """Whether `init` has been called, and `finalizeBackend` not since."""
    return _is_initialized


def finalizeBackend() -> None:
    """Ends the connection. Idempotent."""
    global _is_initialized
    _emulated_pod.disconnect(_GROUP)
    _is_initialized = False


atexit.register(finalizeBackend)


def synchronize() -> None:
    """Returns when all instances have called it. RuntimeError without `init`, or when one does not come in time."""
    size = _environment.getNumInstances()
    if size == 1:
        return
    if not _is_initialized:
        raise RuntimeError("popdist has not been initialised; call popdist.init() in every instance first")
    _emulated_pod.connect(_GROUP, _environment.getInstanceIndex(), size).barrier()


def execute_on_instances(
    instances: Collection[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> Optional[_Result]:
    """Calls func(*args, **kwargs) if this instance is among `instances` and returns its value, elsewhere None.

    Nobody waits for anybody, and the value goes to nobody else. TypeError unless `instances` is a set, or another
    collection, of instance indices and `func` can be called.
    """
    if not isinstance(instances, Collection) or not all(isinstance(index, int) for index in instances):
        raise TypeError(f"execute_on_instances: a set of instance indices is needed, such as {{0}}, not {instances!r}")
    if not callable(func):
        raise TypeError(f"execute_on_instances: a function is needed, not {func!r}")
    return func(*args, **kwargs) if _environment.getInstanceIndex() in instances else None
