"""Torch's factory functions while a model compiles.

PopTorch then replaces them in the whole process by functions that create tensors on the IPU, unless `device` is given.
Here only calls of other threads than the compiling one are affected, which must not expect a tensor of the host: they
get one without values, and a warning; in strict mode an Error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Set

import torch

from poptorch import findings
from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.strict import STRICT, is_strict

# Those that PopTorch replaces. The last one only if no argument is a tensor.
_NAMES = (
    "arange",
    "empty",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "tensor",
    "zeros",
    "zeros_like",
    "normal",
)
_SDK = f"{Path(__file__).resolve().parent.parent.parent}/"
_TORCH = f"{Path(torch.__file__).resolve().parent}/"

_lock = threading.Lock()
_compiling: Dict[int, str] = {}  # names of the threads that compile
_originals: Dict[str, Callable[..., Any]] = {}
_warned: Set[str] = set()


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Context in which this thread compiles, and the functions of `torch` are replaced for all others."""
    thread = threading.current_thread()
    with _lock:
        if not _compiling:
            for name in _NAMES:
                _originals[name] = getattr(torch, name)
                setattr(torch, name, _replacement(name, _originals[name]))
        _compiling[threading.get_ident()] = thread.name
    try:
        yield
    finally:
        with _lock:
            del _compiling[threading.get_ident()]
            if not _compiling:
                for name, original in _originals.items():
                    setattr(torch, name, original)
                _originals.clear()


def _replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        values = itertools.chain(args, kwargs.values()) if name == "normal" else ()
        is_placed = "device" in kwargs or any(isinstance(value, torch.Tensor) for value in values)
        place = None if is_placed or threading.get_ident() in _compiling else _place()
        if place is None:
            return original(*args, **kwargs)
        if findings.is_active():
            findings.add(findings.TROUBLE, "thread", _message(name, place), [Path(place).name])
            return original(*args, **kwargs)
        _reject(name, place)
        return original(*args, **kwargs, device="meta")

    return create


def _message(name: str, place: str) -> str:
    return (
        f"torch.{name}() without a device in the thread {threading.current_thread().name!r} ({place}), while the thread"
        f" {next(iter(_compiling.values()), '')!r} compiles a model: PopTorch then forces such tensors of the whole"
        ' process to the IPU. Pass device="cpu", or wait for the compilation.'
    )


def _reject(name: str, place: str) -> None:
    message = _message(name, place)
    if is_strict():
        raise Error(message)
    if place not in _warned:
        _warned.add(place)
        logger.warning("%s Here it has no values (device meta); %s=1 makes it an Error.", message, STRICT)


def _place() -> Optional[str]:
    """Return file and line of the caller outside of torch; None for the emulated SDK itself: the real one has C++."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return None if file.startswith(_SDK) else f"{file}:{frame.f_lineno}"
