"""Select the real or the emulated SDK, once per process and before anything imports it.

After `select()`, `import poptorch`, `import popdist` and `import horovod.torch` import the selected SDK. The selection
is reported in one line, and a requested SDK that cannot be imported is an error with the original import error.

The doors of the emulated SDK: the only module of raypod that knows where it lies, and imports them.

Importing it does not make the emulated `poptorch` importable: `sdk.select` does, which decides between it and an
installed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Iterator, Optional, Tuple

from raypod.errors import SdkError


@dataclasses.dataclass(frozen=True)
class Sdk:
    """The SDK that this process uses."""

    device: str  # "ipu" or "emulated"
    line: str  # describes the SDK, for logs

    @property
    def has_ipus(self) -> bool:
        """Whether this is the real SDK, which needs partitions and IPUs."""
        return self.device == "ipu"

    @property
    def holds_interpreter_lock(self) -> bool:
        """Whether no thread of this process runs while the SDK executes a call or loads a program."""
        return self.has_ipus or activation.holds_interpreter_lock()


def may_hold_interpreter_lock(device: str) -> bool:
    """Return whether the SDK that `select` would choose may hold the interpreter lock. Imports nothing."""
    is_installed = device == "auto" and _find_real("poptorch") is not None
    return Sdk("ipu" if device == "ipu" or is_installed else "emulated", "").holds_interpreter_lock


def select(device: str) -> Sdk:
    """Make the SDK for `device` ("auto", "ipu" or "emulated") importable in this process.

    Raises:
        SdkError: an SDK is installed or requested and cannot be imported, or `device` is "ipu" and there is no IPU.
    """
    _remove_from_path()
    if device == "emulated":
        return _use_emulated("requested")
    if device == "auto" and _find_real("poptorch") is None:
        return _use_emulated("no poptorch here")
    version, has_ipus = _import_real()
    if has_ipus:
        # The emulated Horovod is the fallback for hosts without one: last in the path, an installed one has priority.
        activation.activate(is_fallback=True)
        return Sdk("ipu", f"Poplar SDK (poptorch {version}){_without_effect()}{without_horovod()}")
    if device == "ipu":
        raise SdkError("--device ipu: poptorch is installed but finds no IPU here; configure a partition")
    return _use_emulated(f"poptorch {version} finds no IPU here")


def select_offline() -> Sdk:
    """Make the installed SDK importable in this process, to compile for IPUs that need not exist.

    Raises:
        SdkError: it cannot be imported.
    """
    _remove_from_path()
    version, _ = _import_real()
    activation.activate(is_fallback=True)  # as `select`
    return Sdk("ipu", f"Poplar SDK (poptorch {version}), without a device")


def sdk_for_programs(device: str) -> Tuple[Sdk, Tuple[str, ...]]:
    """Return the SDK that the programs of a launch import, and the entries that their PYTHONPATH needs for it.

    Imports nothing, so it does not check whether an installed SDK finds IPUs; the programs do.

    Raises:
        SdkError: `device` is "ipu" and no SDK is installed, or it is not one of the three values.
    """
    if device not in ("auto", "ipu", "emulated"):
        raise SdkError(f"--device {device}: use auto, ipu or emulated")
    installed = _find_real("poptorch") is not None
    if device == "emulated" or not (installed or device == "ipu"):
        reason = "requested" if device == "emulated" else "no poptorch here"
        return Sdk("emulated", f"emulated SDK on CPU ({reason})"), (activation.FOLDER,)
    if not installed:
        raise SdkError("--device ipu: no poptorch is installed here; source the SDK's enable scripts")
    return Sdk("ipu", f"Poplar SDK{without_horovod()}"), ()


def without_horovod() -> str:
    """Return the words for a host without Horovod, on which processes use the emulated SDK's; "" if there is one."""
    is_installed = _find_real("horovod") is not None
    return "" if is_installed else "; no Horovod is installed here: horovod.torch is the emulated SDK's, over Gloo"


@contextlib.contextmanager
def importable(device: str) -> Iterator[None]:
    """Make the SDK that `device` selects importable within the context, where one can be found; imports nothing."""
    if device == "ipu":
        yield
        return
    before = list(sys.path)
    sys.path[:0] = [entry for entry in sdk_for_programs(device)[1] if entry not in before]
    try:
        yield
    finally:
        sys.path[:] = before


def requests_compilation() -> bool:
    """Return whether the emulated SDK compiles with torch.compile. SdkError if its variable is neither 0 nor 1."""
    try:
        return activation.requests_compilation()
    except ValueError as error:
        raise SdkError(str(error)) from None


def compiles(device: str, is_here: bool) -> bool:
    """Return whether `device` is certainly the emulated SDK, and compiles with torch.compile. Imports nothing.

    Args:
        is_here: the device is on this host; other ones may have the Poplar SDK.

    Raises:
        SdkError: as `requests_compilation`.
    """
    is_emulated = device == "emulated" or (device == "auto" and is_here and _find_real("poptorch") is None)
    return requests_compilation() and is_emulated


def _without_effect() -> str:
    """Return the words for the requested settings of the emulated SDK, which the real one does not have."""
    flags = ["--strict"] if activation.is_strict() else []
    if activation.requests_memory_format():
        flags.append("--memory-format")
    if requests_compilation():
        flags.append(activation.COMPILE)
    return f", on which {' and '.join(flags)} ha{'s' if len(flags) == 1 else 've'} no effect" if flags else ""


def _use_emulated(reason: str) -> Sdk:
    real = sys.modules.get("poptorch")  # imported above, or by the template of this host's workers
    if real is not None and not str(real.__file__).startswith(activation.FOLDER):
        for name in [name for name in sys.modules if name.partition(".")[0] in ("poptorch", "popdist")]:
            del sys.modules[name]
    activation.activate()
    return Sdk("emulated", f"emulated SDK on CPU ({reason})")


def _import_real() -> Tuple[str, bool]:
    """The version of the installed SDK, and whether it finds an IPU."""
    try:
        with _handlers_kept():
            poptorch = importlib.import_module("poptorch")
            importlib.import_module("popdist")
    except ImportError as error:
        hint = "source the SDK's enable scripts, or use --device emulated"
        raise SdkError(f"the Poplar SDK cannot be imported: {type(error).__name__}: {error} ({hint})") from error
    return str(getattr(poptorch, "__version__", "unknown")), bool(poptorch.ipuHardwareIsAvailable())


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Context of importing PopTorch, which replaces `sys.excepthook` and prints all stacks at SIGTERM: a preemption."""
    excepthook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = excepthook
        faulthandler.unregister(signal.SIGTERM)


def _find_real(name: str) -> Optional[importlib.machinery.ModuleSpec]:
    return importlib.machinery.PathFinder.find_spec(name, activation.path_without())


def _remove_from_path() -> None:
    sys.path[:] = activation.path_without()


_PACKAGE = "_pod"
_FOLDER = Path(__file__).resolve().parent.parent / "emulated_sdk"


def _load_package() -> None:
    """Import the package of the doors from its folder, so that Python finds its modules."""
    spec = importlib.machinery.PathFinder.find_spec(_PACKAGE, [str(_FOLDER)])
    assert spec is not None, "it is a part of raypod"
    assert spec.loader is not None, "it is no namespace package"
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


if _PACKAGE not in sys.modules:
    _load_package()

from _pod import activation, rendezvous, telemetry  # noqa: E402 - importable from here on

__all__ = ["activation", "rendezvous", "telemetry"]
