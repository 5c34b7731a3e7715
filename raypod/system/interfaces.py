"""The network interfaces of this host with their IPv4 addresses, and the address of its own name.

The address on which an installed Horovod listens for other hosts.

Horovod 0.28.1 ignores HOROVOD_GLOO_IFACE for process sets, also for that of all ranks: it listens on the address that
the name of its host resolves to, and every process aborts if the others cannot connect. scripts/install_horovod.sh
builds a Horovod without that defect, marked by its local version.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from importlib.metadata import PackageNotFoundError, version
from typing import Dict, Optional

from raypod.errors import ClusterError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: get the address of an interface
_LOOPBACK = ("127.", "::1", "::ffff:127.")


def interface_addresses() -> Dict[str, str]:
    """Return the interfaces that have an IPv4 address, and the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = {name: _address_of(probe, name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def interface_of(address: str) -> Optional[str]:
    """Return the interface with this address; None if there is none."""
    return next((name for name, own in interface_addresses().items() if own == address), None)


def local_address_to(address: str) -> str:
    """Return this host's source address for packets to `address`. IPv4 only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def address_in(network: str, setting: str) -> str:
    """Return this host's address in a network (CIDR), or the address of the interface of that name.

    Raises:
        ClusterError: there is none; the message names `setting`, the option or key that contains `network`.
    """
    addresses = interface_addresses()
    for interface, address in addresses.items():
        if interface == network or ("/" in network and is_in(address, network)):
            return address
    own = ", ".join(f"{name} {address}" for name, address in addresses.items())
    raise ClusterError(f"host {socket.gethostname()} has no address in {setting} {network}; it has {own}")


def own_name_address() -> str:
    """Return the address of this host's own name: the first on which a socket can listen, as Gloo chooses it.

    Raises:
        OSError: the name does not resolve, or no address of it belongs to this host.
    """
    cause = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError as error:
            cause = error
        else:
            return str(address[0])
    raise cause


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached only from this host."""
    return address.startswith(_LOOPBACK)


def is_in(address: str, network: str) -> bool:
    """Return whether an address is in a network (CIDR), or equal to it if it is an address."""
    if "/" not in network:
        return address == network
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address_of(probe: socket.socket, interface: str) -> Optional[str]:
    """The first IPv4 address of an interface, which is the one that Gloo uses."""
    try:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # the interface has no IPv4 address
        return None
    return socket.inet_ntoa(found[20:24])


_CORRECTED = "gloo.iface"  # in the local version


def own_horovod_problem() -> Optional[str]:
    """Return why other hosts cannot connect to the Horovod that is installed on this host; None if they can."""
    try:
        release = version("horovod")
    except PackageNotFoundError:  # importable without being installed
        release = "?"
    try:
        return horovod_problem(release, socket.gethostname(), own_name_address())
    except OSError as error:
        return horovod_problem(release, socket.gethostname(), "", str(error.strerror or error))


def horovod_problem(release: str, name: str, address: str, error: str = "") -> Optional[str]:
    """Return why other hosts cannot connect to Horovod `release`, whose host has the own `name` and `address`.

    `error` is the reason why the name has no address. None if the others can connect.
    """
    if _CORRECTED in release.partition("+")[2] or not (error or is_loopback(address)):
        return None
    what = f"does not resolve to an own address ({error})" if error else f"resolves to the loopback address {address}"
    return (
        f"its own name {name} {what}, and Horovod {release} listens there instead of on HOROVOD_GLOO_IFACE, so other "
        f"hosts cannot connect; build Horovod with scripts/install_horovod.sh, or let {name} resolve to the host's "
        "network address in /etc/hosts"
    )
