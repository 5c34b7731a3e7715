"""Real or emulated SDK: the only switch on the device, made once per process before anything imports the SDK.

After `select()`, `import poptorch`, `import popdist` and `import horovod.torch` work, whichever SDK stands behind them.
Nothing falls back silently: what was found is said in one line, and an SDK that was asked for and cannot be imported
is told with its original import error.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import sys
from pathlib import Path
from typing import List, Optional, Tuple

from raypod.errors import SdkError

EMULATED_SDK = str(Path(__file__).resolve().parent.parent / "emulated_sdk")


@dataclasses.dataclass(frozen=True)
class Sdk:
    """Which SDK this process uses, and the line that says so."""

    device: str  # "ipu" or "emulated"
    line: str

    @property
    def has_ipus(self) -> bool:
        """Whether it is the real one, with partitions and IPUs to care for."""
        return self.device == "ipu"


def select(device: str) -> Sdk:
    """Make the SDK for `device` ("auto", "ipu" or "emulated") importable in this process.

    Raises:
        SdkError: IPUs were asked for (or an SDK is installed) and its import fails, or no IPU is there.
    """
    _forget_path()
    if device == "emulated":
        return _use_emulated("asked for")
    if device == "auto" and _find_real("poptorch") is None:
        return _use_emulated("no poptorch is installed here")
    version, has_ipus = _import_real()
    if has_ipus:
        # Horovod alone may be missing on an IPU host; ours comes last, so that an installed one wins.
        sys.path.append(EMULATED_SDK)
        return Sdk("ipu", f"Poplar SDK (poptorch {version})")
    if device == "ipu":
        raise SdkError("--device ipu: poptorch is installed and finds no IPU here; is a partition configured?")
    _forget_modules()
    return _use_emulated(f"poptorch {version} finds no IPU here")


def for_programs(device: str) -> Tuple[Sdk, Tuple[str, ...]]:
    """Which SDK the programs of a launch find by their plain imports, and what must stand on their path for that.

    Imports nothing: whether an installed SDK finds IPUs is for the programs to see.

    Raises:
        SdkError: IPUs are asked for and no SDK is installed, or `device` is none of the three.
    """
    if device not in ("auto", "ipu", "emulated"):
        raise SdkError(f"--device {device}: say auto, ipu or emulated")
    installed = _find_real("poptorch") is not None
    if device == "emulated" or not (installed or device == "ipu"):
        reason = "asked for" if device == "emulated" else "no poptorch is installed here"
        return Sdk("emulated", f"emulated SDK on CPU ({reason})"), (EMULATED_SDK,)
    if not installed:
        raise SdkError("--device ipu: no poptorch is installed here; source the SDK's enable scripts")
    return Sdk("ipu", "Poplar SDK"), ()


def offer_store() -> None:
    """Make the store at which instances meet importable, in a process that needs no SDK and no torch."""
    if EMULATED_SDK not in sys.path:
        sys.path.append(EMULATED_SDK)


def _use_emulated(reason: str) -> Sdk:
    sys.path.insert(0, EMULATED_SDK)
    return Sdk("emulated", f"emulated SDK on CPU ({reason})")


def _import_real() -> Tuple[str, bool]:
    """Version of the installed SDK, and whether it finds an IPU."""
    try:
        poptorch = importlib.import_module("poptorch")
        importlib.import_module("popdist")
    except ImportError as error:
        hint = "source the SDK's enable scripts, or use --device emulated"
        raise SdkError(f"the Poplar SDK cannot be imported: {type(error).__name__}: {error} ({hint})") from error
    return str(getattr(poptorch, "__version__", "unknown")), bool(poptorch.ipuHardwareIsAvailable())


def _find_real(name: str) -> Optional[importlib.machinery.ModuleSpec]:
    return importlib.machinery.PathFinder.find_spec(name, _path_without_emulated())


def _path_without_emulated() -> List[str]:
    return [entry for entry in sys.path if entry != EMULATED_SDK]


def _forget_path() -> None:
    sys.path[:] = _path_without_emulated()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("poptorch", "popdist")]:
        del sys.modules[name]
