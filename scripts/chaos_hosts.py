"""The hosts of `chaos.py --elastic`: two Ray nodes on this machine, of which the second one ends and stays lost."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Callable, Iterator, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from raypod.plan.cluster import Cluster, Host  # noqa: E402 - the checkout's own
from tests.support.ray_cluster import SECOND_HOST, end_host, ray_cluster  # noqa: E402


@contextlib.contextmanager
def two_hosts() -> Iterator[Tuple[Cluster, Callable[[], None]]]:
    """Start two hosts and connect to them; yield them as a cluster, and a function that ends the second at once."""
    with ray_cluster(("", SECOND_HOST), {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}) as started:
        addresses = (started.nodes[0].node_ip_address, SECOND_HOST)

        def lose() -> None:
            end_host(started, started.nodes[1])

        yield Cluster("two hosts", tuple(Host(address, address) for address in addresses)), lose
