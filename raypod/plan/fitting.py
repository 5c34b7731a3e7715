"""Which numbers of replicas and instances fit a cluster, for the messages about those that do not."""

from __future__ import annotations

from raypod.plan.cluster import Cluster

IPUS_PER_PROCESS = 64  # PopTorch's limit; more IPUs need more instances


def is_power_of_two(number: int) -> bool:
    """Return whether a positive number is a power of two."""
    return number & (number - 1) == 0


def fits(cluster: Cluster, replicas: int, instances: int, ipus_per_replica: int) -> bool:
    """Return whether the replicas can run in so many instances, without IPUs if `ipus_per_replica` is 0."""
    num_hosts = min(len(cluster.hosts), instances)
    if replicas % instances or instances % num_hosts:
        return False
    per_host, local_ipus = instances // num_hosts, replicas // instances * ipus_per_replica
    if local_ipus and (local_ipus > IPUS_PER_PROCESS or not is_power_of_two(local_ipus)):
        return False
    return all(
        (host.slots is None or per_host <= host.slots) and (host.ipus is None or per_host * local_ipus <= host.ipus)
        for host in cluster.hosts[:num_hosts]
    )


def way_out(cluster: Cluster, replicas: int, instances: int, ipus_per_replica: int) -> str:
    """Return the end of a message about numbers that do not fit: those that do; "" if there are none."""
    counts = [each for each in range(1, replicas + 1) if fits(cluster, replicas, each, ipus_per_replica)]
    if counts:
        return f"; --num-instances can be {', '.join(map(str, counts))}"
    fewer = range(replicas - replicas % instances, 0, -instances)
    found = next((each for each in fewer if fits(cluster, each, instances, ipus_per_replica)), None)
    return f"; use --replicas {found}" if found else ""
