"""What each replica has of its own (BatchNorm statistics, random states), where the SDK lets a program read it.

The real SDK reads back the buffers of replica 0 only (contract section 13), and has no such methods; there a run goes
on with those for all replicas.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, Optional, Tuple


def read(training: Any) -> Optional[Dict[str, Any]]:
    """The state of all replicas of a training model; None before its first call, and where it cannot be read."""
    reader = getattr(training, "emulatedReplicaState", None)
    state: Optional[Dict[str, Any]] = reader() if reader is not None and training.isCompiled() else None
    return state


def load(training: Any, state: Optional[Dict[str, Any]]) -> None:
    """Let all replicas go on from such a state, if there is one."""
    taker = getattr(training, "loadEmulatedReplicaState", None)
    if state is not None and taker is not None:
        taker(state)


def show_replica_0(buffers: Iterable[Tuple[str, Any]], state: Optional[Dict[str, Any]]) -> None:
    """Give the host's buffers (name, tensor) the values of global replica 0, which are those that are saved."""
    values = state["buffers"] if state is not None else {}
    for name, buffer in buffers:
        if name in values:
            buffer.copy_(values[name][0])
