"""Plans with fewer replicas for the same updates: with these an elastic run continues while hosts are lost.

The micro-batch, the global batch and the updates per call stay the same; fewer replicas accumulate more micro-batches.
The position of a sample in the global batch decides to which accumulation step and replica it belongs
(`training.data.order.call_positions`), so that every update has the same samples and the same micro-batches in every
plan.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, Sequence, Tuple

from raypod.errors import ConfigError, UserError
from raypod.plan.placement import partition_conflict
from raypod.plan.plan import Plan, make_plan, with_splits


@dataclasses.dataclass(frozen=True)
class Room:
    """A host that responds, by its name, and the number of replicas that it has room for."""

    host: str
    replicas: int


def largest_fit(full: Plan, room: Sequence[Room], uses_partition: bool = False) -> Plan:
    """Return the plan with the most replicas that has room: as many as `full`, or the largest possible power of two.

    Args:
        full: the plan of the run with all hosts.
        room: the hosts that respond, in the order in which they are used, with the replicas for which each has room.
        uses_partition: the instances attach to the V-IPU partition of the cluster file.

    Raises:
        ConfigError: there is none; the message has the reasons.
    """
    reason = ""
    for replicas, num_hosts in _candidates(full):
        per_host = replicas // num_hosts
        hosts = [each.host for each in room if each.replicas >= per_host][:num_hosts]
        if len(hosts) < num_hosts:
            continue
        try:
            return _with_replicas(full, replicas, hosts, uses_partition)
        except UserError as error:
            reason = reason or f"; {error}"
    there = ", ".join(f"{each.host} ({each.replicas})" for each in room) or "none"
    raise ConfigError(f"no power of two of replicas can continue on the hosts that respond: {there}{reason}")


def smaller_plans(full: Plan) -> List[Plan]:
    """Return the plans with which a run continues while 1, 2, ... hosts are lost; one for each number of replicas."""
    hosts = full.placement.hosts
    room = [Room(host.name, full.geometry.total_replicas // len(hosts)) for host in hosts]
    found: List[Plan] = []
    for left in reversed(range(1, len(hosts))):
        try:
            plan = largest_fit(full, room[:left])
        except ConfigError:
            break
        if not found or sizes_of(plan) != sizes_of(found[-1]):
            found.append(plan)
    return found


def sizes_of(plan: Plan) -> Tuple[int, int]:
    """Return the number of replicas and the gradient accumulation, on which the bits of a run depend."""
    return plan.geometry.total_replicas, plan.geometry.gradient_accumulation


def _candidates(full: Plan) -> Iterator[Tuple[int, int]]:
    """Yield (replicas, hosts): most replicas first, then most hosts. Every host has equally many replicas."""
    total, all_hosts = full.geometry.total_replicas, len(full.placement.hosts)
    fewer = [1 << power for power in reversed(range(total.bit_length())) if 1 << power < total]
    for replicas in (total, *fewer):
        counts = sorted({all_hosts, *(1 << power for power in range(all_hosts.bit_length()))}, reverse=True)
        yield from ((replicas, count) for count in counts if count <= all_hosts and replicas % count == 0)


def _with_replicas(full: Plan, replicas: int, hosts: Sequence[str], uses_partition: bool) -> Plan:
    """Return the plan of `replicas` replicas on hosts, given by name; the others of the cluster follow as spare ones.

    Raises:
        UserError: it cannot be run.
    """
    config, geometry = full.config, full.geometry
    accumulation, rest = divmod(geometry.total_replicas * geometry.gradient_accumulation, replicas)
    if rest:
        raise ConfigError(
            f"{geometry.total_replicas} replicas x accumulation {geometry.gradient_accumulation} cannot be divided "
            f"equally between {replicas} replicas"
        )
    per_host = replicas // len(hosts)
    local = max(size for size in range(1, geometry.local_replicas + 1) if per_host % size == 0)
    pod = {"replicas": replicas, "num_instances": replicas // local, "num_ipus": None}
    config = config.model_copy(
        update={
            "pod": config.pod.model_copy(update=pod),
            "training": config.training.model_copy(update={"gradient_accumulation": accumulation}),
        }
    )
    cluster = full.placement.cluster
    by_name = {host.name: host for host in cluster.hosts}
    used = tuple(by_name[name] for name in hosts)
    cluster = dataclasses.replace(cluster, hosts=(*used, *(host for host in cluster.hosts if host not in used)))
    plan = make_plan(config, dataclasses.replace(cluster, hosts=used), full.task, full.run_dir)
    placement = dataclasses.replace(plan.placement, cluster=cluster)
    conflict = partition_conflict(cluster.vipu, placement) if uses_partition and cluster.vipu is not None else None
    if conflict is not None:
        raise ConfigError(conflict)
    return dataclasses.replace(with_splits(plan, full.pipeline_splits), placement=placement)
