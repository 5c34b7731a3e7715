"""The host-side collectives between instances, and the rendezvous through which the instances connect.

The collectives are those of `horovod.torch`: an installed Horovod, or the emulated SDK's over Gloo. Both use a
key-value server on a port that the system chooses; the process that starts the instances opens it and keeps it open.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from typing import Any, Dict, Optional

from raypod.errors import ClusterError, SdkError
from raypod.host import horovod_address
from raypod.host.interfaces import interface_of, local_address_to
from raypod.instance.horovod_proxy import HorovodProxy

_CONNECT_TIMEOUT_S = 60.0  # to the rendezvous server
# Exceptions of the emulated SDK's communication and of Horovod (real or emulated). Those of the device are in
# `device_failure`: on IPUs the device runs of all instances fail when that of one ends.
_PEER_ERRORS = ("PeerFailed", "HorovodInternalError")
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
    return importlib.util.find_spec("horovod.runner") is not None


def caused_by_peer(error: BaseException) -> bool:
    """Return whether an error of a collective or a call means that another instance failed or does not answer.

    Compares class names, so that the modules that define the classes need not be importable.
    """
    kinds = type(error).__mro__
    if any(kind.__name__ in _PEER_ERRORS for kind in kinds):
        return True
    return device_failure(error) is not None


def device_failure(error: BaseException) -> Optional[str]:
    """Return the recovery action of an error of the device, which the SDK's core has raised; None for other errors.

    UNRECOVERABLE for an UnrecoverableError, "" if it names none. The state of the device is unknown then, other than
    after a `PeerFailed` of the emulated SDK.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if "RecoverableError" in names:
        return str(getattr(error, "recovery_action", ""))
    if "UnrecoverableError" in names:
        return UNRECOVERABLE
    return "" if _has_ended_the_run(error) else None


def _has_ended_the_run(error: BaseException) -> bool:
    kinds = type(error).__mro__
    is_of_poptorch = any(kind.__name__ == "Error" and kind.__module__.startswith("poptorch") for kind in kinds)
    text = f"{getattr(error, 'type', '')} {error}"
    return is_of_poptorch and _ENDED_RUN.search(text) is not None and _OWN_FAULT.search(text) is None


def abort(reason: str) -> None:
    """End every wait of this process for other instances, from any thread. Has an effect on the emulated SDK only."""
    module: Any = sys.modules.get("_pod.wires")
    if module is not None:
        module.abandon_all(reason)


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


def close_connections() -> None:
    """Close the connections that `hvd.shutdown` and `popdist.finalizeBackend` leave open: the emulated SDK's.

    Otherwise an instance that was idle when another one was lost would use its connection to the lost one again.
    """
    module: Any = sys.modules.get("_pod.wires")
    if module is not None:
        module.close()


class Rendezvous:
    """The server through which the instances of one fleet connect. Open until `close`, in any process of `address`.

    `environment` holds the variables that instances need: EMULATED_POD_RENDEZVOUS and the secret that authenticates
    them. A real Horovod connects through a proxy on its own host (`horovod_proxy`), gets its rank from
    `environment.horovod_identity` and its interface from `horovod_interface`.
    """

    def __init__(self, address: str, generation: int = 0) -> None:
        """Listen on `address`, a name or address of this host, and on no other.

        Each repair of a fleet opens a rendezvous of the next `generation`. The emulated SDK must be importable
        (`sdk.select` or `sdk.make_store_importable`).

        Raises:
            OSError: the address cannot be resolved or bound.
        """
        from _pod.store_server import StoreServer  # importable only once the SDK is selected; needs no torch

        self._store = StoreServer(address)
        self.environment: Dict[str, str] = {**self._store.environment, "EMULATED_POD_GENERATION": str(generation)}

    def close(self) -> None:
        """Close the server. Instances can no longer join."""
        self._store.close()


def horovod_proxy(rendezvous: Dict[str, str], cancelled: Optional[threading.Event] = None) -> HorovodProxy:
    """Start the proxy for a real Horovod on this host. `rendezvous` is the environment of a `Rendezvous`.

    Raises:
        RuntimeError: the rendezvous does not answer, has another secret, or `cancelled` was set meanwhile.
    """
    from _pod.store_client import StoreClient  # importable only once the SDK is selected

    host, _, port = rendezvous["EMULATED_POD_RENDEZVOUS"].rpartition(":")
    secret = rendezvous["EMULATED_POD_SECRET"]
    return HorovodProxy(StoreClient(host, int(port), secret, _CONNECT_TIMEOUT_S, cancelled))


def horovod_interface(rendezvous: str) -> Dict[str, str]:
    """Return HOROVOD_GLOO_IFACE, the interface through which this host reaches the address `rendezvous`.

    Without the variable Horovod listens on the address that this host's name resolves to. IPv4 only.
    """
    name = interface_of(local_address_to(rendezvous))
    return {"HOROVOD_GLOO_IFACE": name} if name else {}
