"""The collectives between instances: the rendezvous through which they connect, and their process group.

The collectives are those of `horovod.torch`: an installed Horovod, or the emulated SDK's over Gloo. Both use a
key-value server on a port that the system chooses; the process that starts the instances opens it and keeps it open.

Imports no SDK: the instance initializes `popdist` and Horovod with the environment that is set here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from typing import Dict, Optional, Tuple, Type

from raypod.errors import ClusterError, SdkError
from raypod.plan.placement import Placement, partition_conflict
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system import interfaces
from raypod.system.interfaces import address_in, interface_of, local_address_to
from raypod.system.sdk import rendezvous

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


def check_instance(collectives: str, has_ipus: bool, placement: Placement, host: str) -> None:
    """Check that an instance on this host can join the others. `host` is the name of this host in the plan.

    Raises:
        SdkError: as `check_available`.
        ClusterError: other hosts cannot connect to an installed Horovod here, because of the address that the host's
            own name resolves to; or the partition does not fit the instances.
    """
    check_available(collectives)
    connects = len(placement.hosts) > 1 and uses_installed_horovod()
    problem = interfaces.own_horovod_problem() if connects else None
    if problem is not None:
        raise ClusterError(f"host {host}: {problem}")
    partition = placement.cluster.vipu if has_ipus else None
    conflict = partition_conflict(partition, placement) if partition else None
    if conflict:
        raise ClusterError(conflict)


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


class ProcessGroup:
    """This instance's connection to the other instances, over all generations of a run."""

    def __init__(self, data_network: Optional[str]) -> None:
        """`data_network`: the network of the cluster file for traffic between hosts; None if it names none."""
        self._data_network = data_network
        self._rendezvous: Optional[rendezvous.StoreServer] = None
        self._proxy: Optional[HorovodProxy] = None
        self._cancelled = threading.Event()  # ends the connecting of the proxy
        self.address = "127.0.0.1"  # at which other instances reach this one; set by `configure`

    def data_address(self) -> Optional[str]:
        """Return this host's address in the data network and bind Gloo and Horovod to it; None if there is none.

        Raises:
            ClusterError: the host has no address in that network.
        """
        if self._data_network is None:
            return None
        address = address_in(self._data_network, "metadata.raypod.data_network")
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["HOROVOD_GLOO_IFACE"] = str(interface_of(address))
        return address

    def open_rendezvous(self, address: str, generation: int) -> Dict[str, str]:
        """Open the rendezvous on this host; return the environment variables with which instances connect to it."""
        self.close()
        self._rendezvous = rendezvous.serve(address, generation)
        return self._rendezvous.environment

    def configure(self, environment: Dict[str, str]) -> None:
        """Set the variables of a rendezvous, and those of a real Horovod, in this process."""
        os.environ.update(environment)
        host = rendezvous.host_of(environment)
        if host is None:
            return
        self.address = self.data_address() or local_address_to(host)
        if uses_installed_horovod():
            self._cancelled = threading.Event()
            self._proxy = horovod_proxy(environment, self._cancelled)
            os.environ.update(self._proxy.environment)
            if self._data_network is None:
                os.environ.update(horovod_interface(host))

    def abort(self) -> None:
        """End every wait for other instances, from another thread."""
        self._cancelled.set()
        rendezvous.abort("another instance is lost")

    def leave(self) -> None:
        """Close all connections after `hvd.shutdown`, so that the process can join another group."""
        rendezvous.close()
        self.close()

    def close(self) -> None:
        """Close the proxy and the rendezvous, if they are open."""
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None
