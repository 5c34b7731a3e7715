"""The plan for the eye: as a table for people, as plain data for programs, as five numbers for the summary."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

from raypod.cli import format_table
from raypod.plan.cluster import Host
from raypod.plan.placement import InstanceSpec, Placement, device_id, gcd_index, num_gcds, link_domain_index, partition_conflict
from raypod.plan.plan import Plan

_GEOMETRY = (  # the sizes in plan.json
    *("micro_batch_size", "gradient_accumulation", "device_iterations", "total_replicas", "num_instances"),
    *("ipus_per_replica", "evaluation_iterations", "local_replicas", "local_ipus", "total_ipus", "replica_samples"),
    *("global_batch_size", "micro_batches_per_call", "combined_batch_size", "samples_per_call"),
    *("evaluation_batch_size", "is_aligned"),
)
_NAMED_HOSTS = 8
_NAME_WIDTH = 12


def describe(plan: Plan) -> Dict[str, Any]:
    """The plan as plain data: what `--json` prints and `plan.json` holds."""
    return {
        "cluster": dataclasses.asdict(plan.placement.cluster),
        "geometry": {name: getattr(plan.geometry, name) for name in _GEOMETRY},
        "dataset": {"name": plan.config.data.dataset, **dataclasses.asdict(plan.size)},
        "updates_per_epoch": plan.updates_per_epoch,
        "total_updates": plan.total_updates,
        "instances": [{**dataclasses.asdict(spec), **_seat(plan, spec)} for spec in plan.placement.instances],
        "legs": [dataclasses.asdict(leg) for leg in plan.legs()],
        "pipeline_splits": list(plan.pipeline_splits),
        "run_dir": plan.run_dir,
    }


def topology_summary(plan: Plan) -> Dict[str, int]:
    """The placement in five numbers, for the summary."""
    return {
        "hosts": len(plan.placement.hosts),
        "instances": plan.geometry.num_instances,
        "replicas": plan.geometry.total_replicas,
        "local_replicas": plan.geometry.local_replicas,
        "ipus_per_replica": plan.geometry.ipus_per_replica,
    }


def render(plan: Plan) -> str:
    """The plan as a table for people."""
    geometry, training = plan.geometry, plan.config.training
    tested = f"{plan.size.test_samples} test" if plan.size.test_samples else "NO test images: nothing will be evaluated"
    published = " (as published; the files are not here)" if plan.size.is_published else ""
    rows: List[Tuple[str, str]] = [
        ("pod", f"{plan.placement.cluster.name}: {_count(len(plan.placement.hosts), 'host')} ({_names(plan.placement.hosts)})"),
        (
            "placement",
            f"{_count(geometry.num_instances, 'instance')} x {_count(geometry.local_replicas, 'replica')} x "
            f"{_count(geometry.ipus_per_replica, 'IPU')} = {_count(geometry.total_ipus, 'IPU')}",
        ),
        *_pod_rows(plan),
        (
            "global batch",
            f"{training.batch_size} (micro-batch) x {training.gradient_accumulation} (accumulation) x "
            f"{geometry.total_replicas} (replicas) = {geometry.global_batch_size} samples per update",
        ),
        (
            "call",
            f"{_count(training.device_iterations, 'update')}; each instance feeds "
            f"{geometry.combined_batch_size} samples",
        ),
        (
            "data",
            f"{plan.config.data.dataset}: {plan.size.train_samples} training, {tested}{published}",
        ),
        ("model", f"{training.model}, precision {training.precision}, {training.optimizer}"),
        (
            "length",
            f"{plan.total_updates} updates, {plan.updates_per_epoch} per epoch, {_count(len(plan.legs()), 'leg')}",
        ),
        ("bits", _same_bits(plan)),
        ("run folder", plan.run_dir),
    ]
    if geometry.ipus_per_replica > 1:
        cuts = ", ".join(f"IPU {ipu} from {name}" for ipu, name in enumerate(plan.pipeline_splits, start=1))
        rows.insert(2, (training.execution, cuts or "by the blocks of the model itself"))
    lines = [f"{name:>12}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_instance_table(plan)])


def _pod_rows(plan: Plan) -> List[Tuple[str, str]]:
    """What the cluster file says beyond the hosts that carry instances."""
    cluster, rows = plan.placement.cluster, []
    idle = cluster.hosts[len(plan.placement.hosts) :]
    if idle:
        rows.append(("idle", f"{_count(len(idle), 'host')} without an instance ({_names(idle)})"))
    if cluster.data_network:
        rows.append(("data network", f"{cluster.data_network}: rendezvous, Gloo and Horovod use it alone"))
    if cluster.vipu is not None:
        gcds = num_gcds(cluster.vipu, plan.placement)
        rows.append(
            (
                "partition",
                f"{cluster.vipu.partition} at {cluster.vipu.server}:{cluster.vipu.port}: {_count(gcds, 'GCD')}, "
                f"{_count(cluster.vipu.link_domains, 'IPU-Link domain')}",
            )
        )
        misfit = partition_conflict(cluster.vipu, plan.placement)
        if misfit:
            rows.append(("", f"on IPUs this run would be refused: {misfit}"))
    return rows


def _instance_table(plan: Plan) -> List[str]:
    """One line per instance, host by host."""
    placement = plan.placement
    columns = ["instance", "host", "local", "replicas", "threads"]
    has_ipus = plan.placement.cluster.vipu is not None or any(host.ipus for host in plan.placement.hosts)
    if has_ipus:
        columns += ["IPUs", "ILD", "GCD", "device"]
    if placement.binds_numa:
        columns.append("NUMA")
    table = []
    for spec in plan.placement.instances:
        threads = spec.local_replicas * spec.threads_per_replica
        cells = [spec.index, spec.host, spec.local_index, _span_of(spec.replica_offset, spec.local_replicas), threads]
        if has_ipus:
            seat = _seat(plan, spec)
            cells.append(_span_of(spec.index * placement.sizes.local_ipus, placement.sizes.local_ipus))
            cells += [seat["link_domain"], seat["gcd"], seat["device"]]
        if placement.binds_numa:
            cells.append(f"node {spec.local_index}")
        table.append(["-" if cell is None else str(cell) for cell in cells])
    rows = [columns, *table]
    return format_table([[row[0].rjust(_NAME_WIDTH), *row[1:]] for row in rows])


def _seat(plan: Plan, spec: InstanceSpec) -> Dict[str, Optional[int]]:
    """Where an instance sits in the partition of the pod."""
    vipu = plan.placement.cluster.vipu
    domains, gcds = (vipu.link_domains, num_gcds(vipu, plan.placement)) if vipu else (1, 1)
    return {
        "link_domain": link_domain_index(spec, plan.placement, domains),
        "gcd": gcd_index(spec, gcds),
        "device": device_id(spec, plan.placement),
    }


def _names(hosts: Sequence[Host]) -> str:
    """The hosts by name; of many the first and the last."""
    if len(hosts) > _NAMED_HOSTS:
        return f"{hosts[0].name} to {hosts[-1].name}"
    return ", ".join(host.name for host in hosts)


def _span_of(first: int, count: int) -> str:
    return f"{first}..{first + count - 1}"


def _same_bits(plan: Plan) -> str:
    if not plan.config.pod.threads_per_replica:
        return "those of this placement: the threads of a replica depend on the cores of its host"
    if plan.geometry.is_aligned:
        return "the same for every placement of these replicas (32.32, emulated SDK)"
    return "the same for every placement; this one is no aligned block of the reduction tree, which costs bandwidth"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- from launcher.topology: Which instance and which replicas are where, as a table (`--print-topology`).


def render_topology(placement: Placement, num_ilds: Optional[int]) -> str:
    """Host, IPU-Link domain, instance, replicas and IPUs, one line per instance."""
    per_instance = placement.sizes.local_ipus
    rows: List[Sequence[str]] = [("host", "ILD", "instance", "replicas", "IPUs")]
    for spec in placement.instances:
        replicas = _span(spec.replica_offset, spec.local_replicas)
        ipus = _span(spec.index * per_instance, per_instance)
        rows.append((spec.host, str(link_domain_index(spec, placement, num_ilds or 1)), str(spec.index), replicas, ipus))
    return "\n".join(format_table(rows, boxed=True))


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}..{first + count - 1}"
