"""What is in force while a model compiles: hooks, the progress bar, torch's factory functions, substitutions.

PopTorch replaces the factory functions in the whole process by functions that create tensors on the IPU, unless
`device` is given. Here only calls of other threads than the compiling one are affected, which must not expect a tensor
of the host: they get one without values, and a warning; in strict mode an Error. A package such as PopTorch's for
PyTorch Geometric registers its substitutions of functions.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import importlib.util
import itertools
import sys
import threading
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Optional, Protocol, Set

import torch
from _pod.activation import FOLDER, STRICT, is_strict
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from poptorch import findings
from poptorch.environment import logger
from poptorch.errors import Error

_Hook = Callable[..., Any]

_before_compile: Dict[int, _Hook] = collections.OrderedDict()
_after_compile: Dict[int, _Hook] = collections.OrderedDict()

_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"  # as the SDK's: a percentage has no rate


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook, without arguments, before each compilation, until the handle's `remove()`.

    Raises:
        RuntimeError: the hook is not callable.
    """
    return _register(_before_compile, hook)


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call the hook after each compilation; otherwise as `registerPreCompileHook`."""
    return _register(_after_compile, hook)


@contextlib.contextmanager
def around_compilation(shows_progress: bool) -> Iterator[None]:
    """Context of a compilation: calls the hooks before and after it, in the order of registration."""
    _call(_before_compile)
    with _progress_bar() if shows_progress else contextlib.nullcontext():
        yield
    _call(_after_compile)


@contextlib.contextmanager
def _progress_bar() -> Iterator[None]:
    with tqdm(total=100, desc="Graph compilation", bar_format=_BAR_FORMAT) as bar:
        try:
            yield
        finally:
            bar.update(100)


def _call(hooks: Dict[int, _Hook]) -> None:
    for hook in list(hooks.values()):
        hook()


def _register(hooks: Dict[int, _Hook], hook: _Hook) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"A compile hook must be callable, and {hook!r} is not")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


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
_SDK = f"{FOLDER}/"
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


class SubstitutionManager(Protocol):
    """Replaces functions, for example of a library of layers, by others that suit an IPU."""

    def replace(self) -> None:
        """Replace the functions."""

    def restore(self) -> None:
        """Restore the original functions."""


class Substitutions:
    """Context in which the functions of all registered managers are replaced.

    The SDK enters it when it compiles. The emulation also enters it for every call, as it runs the forward again.
    """

    _subsitution_manager_types: ClassVar[List[Any]] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as restores:  # also if a later manager raises an exception
            for kind in self._subsitution_manager_types:
                manager: SubstitutionManager = kind()
                restores.callback(manager.restore)
                manager.replace()
            self._restores = restores.pop_all()

    def __exit__(self, *exc_info: Any) -> None:
        self._restores.close()

    @classmethod
    def registerSubsitutionManager(cls, type: Any) -> None:
        """Register a class of managers, once. Its objects have the methods of `SubstitutionManager`."""
        if type not in cls._subsitution_manager_types:
            cls._subsitution_manager_types.append(type)


def register_geometric() -> None:
    """Register the parsers and the managers of poptorch_geometric if it is installed, as the SDK does when imported."""
    if importlib.util.find_spec("poptorch_geometric") is None:
        return
    try:
        importlib.import_module("poptorch_geometric.types").registerCustomArgParsers()
    except ImportError as error:  # of a library that poptorch_geometric needs; the program may not use it
        logger.warning("poptorch_geometric is installed, but cannot be imported: %s", error)
