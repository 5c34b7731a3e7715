"""The host-side collectives between instances, and the rendezvous through which the instances connect.

The collectives are those of `horovod.torch`: an installed Horovod, or the emulated SDK's over Gloo. Both use a
key-value server on a port that the system chooses; the process that starts the instances opens it and keeps it open.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from typing import Dict, Optional, Tuple, Type

from raypod.errors import ClusterError, SdkError
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system import horovod_address
from raypod.system.emulated import rendezvous
from raypod.system.interfaces import interface_of, local_address_to

_CONNECT_TIMEOUT_S = 60.0  # to the rendezvous server
UNRECOVERABLE = "UNRECOVERABLE"
# It can also be a plain `poptorch.Error` (inferred), by its type or its text. A floating-point exception has the same
# type, and is of the instance's own program.
_ENDED_RUN = re.compile(r"application[ _]runtime[ _]error|host[ -]?sync\w*\b.*\btimed?[ -]?out", re.IGNORECASE)
_OWN_FAULT = re.compile(r"floating[ -]point", re.IGNORECASE)


def check_available(collectives: str) -> None:
    """Check that Horovod is installed if `--collectives horovod` requires it.

    Raises:
        SdkError: it is not installed.
    """
    if collectives == "horovod" and not uses_installed_horovod():
        raise SdkError("--collectives horovod: Horovod with torch support is not installed; use --collectives gloo")


def check_host_name(host: str) -> None:
    """Check that other hosts can connect to an installed Horovod here. `host` is the name of this host in the plan.

    Raises:
        ClusterError: they cannot, because of the address that the host's own name resolves to.
    """
    problem = horovod_address.own_problem() if uses_installed_horovod() else None
    if problem is not None:
        raise ClusterError(f"host {host}: {problem}")


def uses_installed_horovod() -> bool:
    """Return whether `import horovod.torch` imports an installed Horovod (the emulated one defers to it)."""
    return all(importlib.util.find_spec(name) is not None for name in ("horovod", "horovod.runner"))


def caused_by_peer(error: BaseException) -> bool:
    """Return whether an error of a collective or a call means that another instance failed or does not answer.

    On IPUs the device runs of all instances fail when that of one ends.
    """
    of_horovod = _loaded("horovod.common.exceptions", "HorovodInternalError")
    return isinstance(error, (rendezvous.PeerFailed, *of_horovod)) or device_failure(error) is not None


def device_failure(error: BaseException) -> Optional[str]:
    """Return the recovery action of an error of the device, which the SDK's core has raised; None for other errors.

    UNRECOVERABLE for an UnrecoverableError, "" if it names none. The state of the device is unknown then, other than
    after a `PeerFailed` of the emulated SDK.
    """
    if isinstance(error, _loaded("poptorch", "RecoverableError")):
        return str(getattr(error, "recovery_action", ""))
    if isinstance(error, _loaded("poptorch", "UnrecoverableError")):
        return UNRECOVERABLE
    return "" if _has_ended_the_run(error) else None


def _has_ended_the_run(error: BaseException) -> bool:
    is_of_poptorch = isinstance(error, _loaded("poptorch", "Error"))
    text = f"{getattr(error, 'type', '')} {error}"
    return is_of_poptorch and _ENDED_RUN.search(text) is not None and _OWN_FAULT.search(text) is None


def _loaded(module: str, name: str) -> Tuple[Type[BaseException], ...]:
    """Return a class of an SDK as a tuple; () if this process has not imported its module: there is no such error."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def initialize() -> None:
    """Initialize popdist and Horovod of the selected SDK; all instances must call it."""
    import horovod.torch as hvd  # importable only once the SDK is selected
    import popdist  # as above

    popdist.init()
    hvd.init()


def finalize() -> None:
    """Leave the process group that `initialize` has joined."""
    import horovod.torch as hvd  # as above
    import popdist  # as above

    hvd.shutdown()
    popdist.finalizeBackend()


def horovod_proxy(environment: Dict[str, str], cancelled: Optional[threading.Event] = None) -> HorovodProxy:
    """Start the proxy for a real Horovod on this host: the store `environment` (`rendezvous.serve`) has its values.

    Horovod gets its rank from `environment.horovod_identity` and its interface from `horovod_interface`.

    Raises:
        RuntimeError: the rendezvous does not answer, has another secret, or `cancelled` was set meanwhile.
    """
    return HorovodProxy(rendezvous.connect(environment, _CONNECT_TIMEOUT_S, cancelled))


def horovod_interface(rendezvous: str) -> Dict[str, str]:
    """Return HOROVOD_GLOO_IFACE, the interface through which this host reaches the address `rendezvous`.

    Without the variable Horovod listens on the address that this host's name resolves to. IPv4 only.
    """
    name = interface_of(local_address_to(rendezvous))
    return {"HOROVOD_GLOO_IFACE": name} if name else {}
