"""The handles of asynchronous operations."""

from __future__ import annotations

import itertools
import os
from typing import Any, Callable, Dict, NamedTuple, Optional

from horovod.torch._checks import check_name
from horovod.torch._engine import Engine
from horovod.torch._operations import Operation


class _Submitted(NamedTuple):
    engine: Engine
    operation: Operation
    convert: Callable[[Any], Any]  # applied to the result


_submitted: Dict[int, _Submitted] = {}
_next_handle = itertools.count()
os.register_at_fork(after_in_child=_submitted.clear)  # a forked child has no engines


def submit(
    engine: Engine,
    kind: str,
    name: Optional[str],
    make: Callable[[str], Operation],
    convert: Callable[[Any], Any] = lambda result: result,
) -> int:
    """Start the operation that `make` constructs from its key; return its handle. `convert` is applied to the result.

    Raises:
        HorovodInternalError: Horovod has been shut down.
        TypeError: the name is no text.
        ValueError: an operation of that name is pending.
    """
    check_name(name)
    handle = next(_next_handle)
    _submitted[handle] = _Submitted(engine, engine.submit(make, kind, name), convert)
    return handle


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once; ValueError for a handle that is not pending."""
    if handle not in _submitted:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return _submitted[handle].operation.is_done


def synchronize(handle: int) -> Any:
    """Wait for the operation and return its tensor, or its tuple of tensors; None if the handle was used before.

    Raises:
        HorovodInternalError: the operation failed; on all ranks, if they disagree about it.
    """
    submitted = _submitted.pop(handle, None)
    return None if submitted is None else submitted.convert(submitted.engine.wait(submitted.operation))
