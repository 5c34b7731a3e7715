"""The address on which an installed Horovod listens for other hosts.

Horovod 0.28.1 ignores HOROVOD_GLOO_IFACE for process sets, also for that of all ranks: it listens on the address that
the name of its host resolves to, and every process aborts if the others cannot connect. scripts/install_horovod.sh
builds a Horovod without that defect, marked by its local version.
"""

from __future__ import annotations

import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Optional

from raypod.system.interfaces import is_loopback, own_name_address

_CORRECTED = "gloo.iface"  # in the local version


def own_problem() -> Optional[str]:
    """Return why other hosts cannot connect to the Horovod that is installed on this host; None if they can."""
    try:
        release = version("horovod")
    except PackageNotFoundError:  # importable without being installed
        release = "?"
    try:
        return problem(release, socket.gethostname(), own_name_address())
    except OSError as error:
        return problem(release, socket.gethostname(), "", str(error.strerror or error))


def problem(release: str, name: str, address: str, error: str = "") -> Optional[str]:
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
