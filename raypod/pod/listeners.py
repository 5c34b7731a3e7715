"""Check the listening ports of a host: conflicts with the start commands, and exposure to the network."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from raypod.host.interfaces import is_address, is_in, is_loopback
from raypod.pod.finding import OK, TROUBLE, WARN, Expected, Facts, Finding

MONITOR_PORTS = (44217, 44227)  # metrics of the autoscaler and the dashboard; Ray has no flag for them
DASHBOARD_PORT = 8265
_RAY_CLIENT_PORT = 10001
_ANY = ("0.0.0.0", "::")


def ports(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    """Check that the ports of the start commands are free, or used by this cluster."""
    if not expected.ports:
        return
    cluster, taken, ours = expected.cluster, {}, 0
    for each in facts["listening"]:
        is_workers = expected.worker_ports[0] <= each["port"] <= expected.worker_ports[1]
        if each["port"] in expected.ports or is_workers:
            is_driver = is_workers and each["is_ray"] and each["cluster"] is None
            if each["cluster"] == cluster.name or is_driver:
                ours += 1
            else:
                taken[each["port"]] = each
    for port, each in sorted(taken.items()):
        owner = f"{each['program']}, pid {each['pid']}" if each["pid"] else "a process of another user"
        of_cluster = f" of the cluster {each['cluster']}" if each["cluster"] else ""
        if each["is_orphan"]:
            text = f"{port} is in use by {owner}, which is left of a Ray that has ended"
            yield Finding(WARN, host, "ports", text, "it ends by itself within a minute")
            continue
        way_out = "stop it, or change the ports in the start commands"
        yield Finding(TROUBLE, host, "ports", f"{port} is in use by {owner}{of_cluster}", way_out)
    others = sum(1 for mark in facts["clusters"] if mark != cluster.name)
    if others:
        text = f"{others} other Ray cluster{'s' if others > 1 else ''} on this host"
        yield Finding(WARN, host, "ports", text, "`raypod up` and `down` do not affect other clusters")
    if not taken:
        yield Finding(OK, host, "ports", "in use by this cluster" if ours else f"{len(expected.ports)} free")


def exposure(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    """Check the addresses on which this cluster listens.

    Ray binds most of its ports to all interfaces and protects them by the token.
    """
    name, (first, last) = expected.cluster.name, expected.worker_ports
    ours = [each for each in facts["listening"] if each["cluster"] == name and not is_loopback(each["address"])]
    if not ours or expected.cluster.is_local:
        return
    for each in ours:
        if each["port"] == DASHBOARD_PORT:
            text = f"listens on {each['address']}:{DASHBOARD_PORT}"
            way_out = "start Ray with --dashboard-host=127.0.0.1, and use `ray dashboard`"
            yield Finding(TROUBLE, host, "dashboard", text, way_out)
    known = {*expected.ports, *range(first, last + 1), *MONITOR_PORTS, _RAY_CLIENT_PORT}
    rest = [each for each in ours if each["port"] not in known]
    open_to_all = sorted({each["port"] for each in rest if each["address"] in _ANY})
    if open_to_all:
        numbers = ", ".join(map(str, open_to_all))
        text = f"{numbers}: ports of Ray on all interfaces that no start command fixes"
        yield Finding(WARN, host, "exposed", text, "restrict access to the hosts by a firewall")
    network = expected.cluster.data_network or next((e.address for e in expected.cluster.hosts if e.name == host), host)
    outside = {f"{e['address']}:{e['port']}" for e in rest if e["address"] not in _ANY and not _is_of(e, network)}
    if outside:
        text = f"{', '.join(sorted(outside))}: of an instance, outside the data network {network}"
        yield Finding(WARN, host, "exposed", text, "correct metadata.raypod.data_network and restart the run")
    pages = sorted({each["port"] for each in ours if each["port"] in (*MONITOR_PORTS, expected.metrics_port)})
    if pages:
        text = f"{', '.join(map(str, pages))}: metrics, readable without the token"
        way_out = "restrict access to the hosts and the metrics collector by a firewall"
        yield Finding(WARN, host, "exposed", text, way_out)
    inside = f", {len(rest)} of instances in {network}" if rest and not open_to_all and not outside else ""
    of_ray = len({each["port"] for each in ours if each["port"] in known})
    yield Finding(OK, host, "exposed", f"{of_ray} ports of Ray{inside} (see docs/explanation/security.md)")


def _is_of(listener: Mapping[str, Any], network: str) -> bool:
    address = str(listener["address"]).replace("::ffff:", "")
    return is_address(address) and is_in(address, network)
