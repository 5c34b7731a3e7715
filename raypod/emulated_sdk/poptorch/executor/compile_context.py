"""What is in force while a model compiles: hooks, factory functions of torch, substitutions, the SDK's variables.

PopTorch replaces the factory functions in the whole process by functions that create tensors on the IPU, unless
`device` is given. Here only calls of other threads than the compiling one are affected, which must not expect a tensor
of the host: they get one without values, and a warning; in strict mode an Error. A package such as PopTorch's for
PyTorch Geometric registers its substitutions of functions.

The environment variables of the Poplar SDK have their effect here, or one warning names them. Their table is also in
docs/reference/emulated-sdk.md.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Iterator, List, Mapping, Optional, Set

import torch
from _pod.activation import STRICT, is_strict
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from poptorch import findings
from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.options import Options

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
    with contextlib.ExitStack() as stack:
        if shows_progress:
            bar = stack.enter_context(tqdm(total=100, desc="Graph compilation", bar_format=_BAR_FORMAT))
            stack.callback(bar.update, 100)
        yield
    _call(_after_compile)


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

_lock = threading.Lock()
_compiling: Dict[int, str] = {}  # names of the threads that compile
_originals: Dict[str, Callable[..., Any]] = {}
_warned_places: Set[str] = set()


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Context in which this thread compiles, and the functions of `torch` are replaced for all others."""
    thread = threading.current_thread()
    if threading.get_ident() in _compiling:  # a layer on the host has called another model
        yield
        return
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
    if place not in _warned_places:
        _warned_places.add(place)
        logger.warning("%s Here it has no values (device meta); %s=1 makes it an Error.", message, STRICT)


def _place() -> Optional[str]:
    """Return file and line of the caller outside of torch; None for the emulated SDK itself: the real one has C++."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(findings.TORCH_FOLDER):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return None if file.startswith(findings.SDK_FOLDER) else f"{file}:{frame.f_lineno}"


class Substitutions:
    """Context in which all registered managers replace functions, as of a library of layers, by some that suit an IPU.

    The SDK enters it when it compiles. The emulation also enters it for every call, as it runs the forward again.
    """

    _subsitution_manager_types: ClassVar[List[Any]] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as restores:  # also if a later manager raises an exception
            for kind in self._subsitution_manager_types:
                manager = kind()
                restores.callback(manager.restore)
                manager.replace()
            self._restores = restores.pop_all()

    def __exit__(self, *exc_info: Any) -> None:
        self._restores.close()

    @classmethod
    def registerSubsitutionManager(cls, type: Any) -> None:
        """Register a class of managers, once. Its objects have the methods `replace()` and `restore()`."""
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


_ENGINE_OPTIONS = "POPLAR_ENGINE_OPTIONS"
PREFIXES = ("GCDA_", "IPUOF_", "POPART_", "POPLAR_", "POPLIBS_", "POPTORCH_", "PVTI_", "TF_POPLAR_")

EFFECTS = {
    "POPTORCH_CACHE_DIR": "stored in the options, as by enableExecutableCaching; nothing is written",
    "POPTORCH_DEFAULT_OPTIONS": "called as setters of each Options",
    "POPTORCH_LOG_LEVEL": "the level of the log",
    "PVTI_OPTIONS": "spans as Trace Event JSON",
}
# Without effect, by name or prefix: why.
NO_EFFECT = {
    _ENGINE_OPTIONS: "there is no Poplar engine",
    "POPLAR_TARGET_OPTIONS": "there are no IPUs",
    "POPLAR_": "there is no Poplar",
    "POPART_": "there is no PopART",
    "POPLIBS_": "there are no Poplar libraries",
    "POPTORCH_EXPORT_PROTO_AS_BINARY": "no graph is written",
    "POPTORCH_EXPORT_PROTO_FILE": "no graph is written",
    "POPTORCH_IPU_MODEL": "every model runs on the CPU",
    "POPTORCH_IPU_MODEL_VERSION": "every model runs on the CPU",
    "POPTORCH_LOG_DEST": "the log goes to stderr",
    "POPTORCH_MAX_GRAPH_LEN": "no graph is logged",
    "POPTORCH_SMALL_IPU_MODEL": "every model runs on the CPU",
    "POPTORCH_WAIT_FOR_IPU": "there are no IPUs to wait for",
    "POPTORCH_": "PopTorch 3.4 does not have it",
    "GCDA_": "there are no IPUs to monitor",
    "IPUOF_": "there are no IPUs",
    "PVTI_": "there is no PVTI library",
    "TF_POPLAR_": "TensorFlow is not emulated",
}
# Set by the SDK's own scripts, and by poprun for each instance.
_OF_THE_SDK = frozenset(("POPLAR_SDK_ENABLED", "POPLAR_DIR", "POPART_DIR", "POPLAR_LIB"))
_OF_POPRUN = ("IPUOF_VIPU_API_", "IPUOF_LOG_LEVEL", "POPLAR_TARGET_OPTIONS")
_REPORT = "autoReport."

_warned_variables: Set[str] = set()


def warn_of_variables(options: Options) -> None:
    """Warn in the first process of each variable that is set and has no effect, and of a report that is not written.

    Raises:
        Error: POPLAR_ENGINE_OPTIONS is not a JSON object.
    """
    found = _without_effect()
    report = _report(_engine_options(options))
    if report and _ENGINE_OPTIONS in found:
        found[_ENGINE_OPTIONS] = report
    elif report:
        found["enableProfiling"] = report
    new = {name: reason for name, reason in found.items() if name not in _warned_variables}
    _warned_variables.update(new)
    if new and options.Distributed.processId == 0:
        logger.warning(
            "The emulated SDK ignores: %s.", "; ".join(f"{name} ({reason})" for name, reason in sorted(new.items()))
        )


def host_sync_timeout_s(options: Options) -> float:
    """Return the seconds after which an IPU ends a call: `target.hostSyncTimeout` of the engine options, else 300."""
    return float(_engine_options(options).get("target.hostSyncTimeout", 300))


def _without_effect() -> Dict[str, str]:
    """Return the variables of the SDK that are set and have no effect, each with the reason."""
    is_launched = "POPDIST_NUM_TOTAL_REPLICAS" in os.environ
    ignored = {name for name in os.environ if is_launched and name.startswith(_OF_POPRUN)}
    names = [name for name in os.environ if name.startswith(PREFIXES) and os.environ[name]]
    return {name: _reason(name) for name in names if name not in {*EFFECTS, *_OF_THE_SDK, *ignored}}


def _reason(name: str) -> str:
    prefixes: List[str] = sorted(filter(name.startswith, NO_EFFECT), key=len)
    return NO_EFFECT[name] if name in NO_EFFECT else NO_EFFECT[prefixes[0]]


def _engine_options(options: Options) -> Dict[str, Any]:
    """Return the engine options of the program, and those of the environment, which have precedence."""
    text = os.environ.get(_ENGINE_OPTIONS, "")
    try:
        given = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise Error(f"{_ENGINE_OPTIONS}={text!r} is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise Error(f'{_ENGINE_OPTIONS}={text!r} is not a JSON object, as {{"autoReport.all": "true"}} is')
    return {**(options._Popart.options.get("engineOptions") or {}), **given}


def _report(engine: Mapping[str, Any]) -> str:
    """Return which report of PopVision these engine options request; empty if they request none."""
    requested = [name for name in engine if name.startswith(_REPORT) and str(engine[name]).lower() == "true"]
    directory = engine.get(f"{_REPORT}directory", ".")
    return f"no profile.pop for PopVision is written in {directory}" if requested else ""
