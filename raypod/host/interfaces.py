"""The network interfaces of this host: their addresses, and which of them leads where."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import Dict, Optional

from raypod.errors import ClusterError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def interface_addresses() -> Dict[str, str]:
    """The interfaces of this host that have an IPv4 address, and that address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = {name: _address_of(probe, name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def interface_of(address: str) -> Optional[str]:
    """The interface that has an address; None if none has."""
    return next((name for name, own in interface_addresses().items() if own == address), None)


def address_towards(address: str) -> str:
    """This host's own address on the way to another. IPv4 only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def address_in(network: str, setting: str) -> str:
    """This host's address in a network (CIDR), or of an interface of that name.

    Raises:
        ClusterError: it has none; `setting` says what asked for it.
    """
    addresses = interface_addresses()
    for interface, address in addresses.items():
        if interface == network or ("/" in network and is_in(address, network)):
            return address
    told = ", ".join(f"{name} {address}" for name, address in addresses.items())
    raise ClusterError(f"host {socket.gethostname()} has no address in {setting} {network}; it has {told}")


def is_in(address: str, network: str) -> bool:
    """Whether an address is in a network (CIDR), or is that very one."""
    if "/" not in network:
        return address == network
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def is_address(text: str) -> bool:
    """Whether a text is an address, not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address_of(probe: socket.socket, interface: str) -> Optional[str]:
    """The first IPv4 address of an interface, which is the one that Gloo takes."""
    try:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(found[20:24])
