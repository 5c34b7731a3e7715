"""The network side of one instance: its address, the rendezvous, and the proxy of a real Horovod.

Imports no SDK: the instance initializes `popdist` and Horovod with the environment that is set here.
"""

from __future__ import annotations

import os
import threading
from typing import Dict, Optional

from raypod.runtime.worker.collectives import horovod_interface, horovod_proxy, uses_installed_horovod
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system.emulated import rendezvous
from raypod.system.interfaces import address_in, interface_of, local_address_to


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
