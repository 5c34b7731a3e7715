"""Renderings of a plan: a table, plain data for JSON, the summary's counts, and the topology of a launch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from raypod.plan import ipu_options, shipped
from raypod.plan.cluster import Host, VipuPartition
from raypod.plan.elastic import smaller_plans
from raypod.plan.learning_rate import rate_samples, scaling_text
from raypod.plan.placement import (
    InstanceSpec,
    Placement,
    device_id,
    gcd_index,
    link_domain_index,
    num_gcds,
    partition_conflict,
)
from raypod.plan.plan import Plan
from raypod.plan.values import stages_of
from raypod.system.command_line import counted, format_table

_GEOMETRY = (  # the keys of `geometry` in plan.json
    *("micro_batch_size", "gradient_accumulation", "device_iterations", "total_replicas", "num_instances"),
    *("ipus_per_replica", "evaluation_iterations", "local_replicas", "local_ipus", "total_ipus", "replica_samples"),
    *("global_batch_size", "micro_batches_per_call", "combined_batch_size", "samples_per_call"),
    *("evaluation_batch_size", "is_aligned"),
)
_MAX_NAMES = 8  # of hosts; of more only the first and the last are shown
_NAME_WIDTH = 12


def describe(plan: Plan) -> Dict[str, Any]:
    """Return the plan as plain data: the content of `plan.json` and the output of `--json`."""
    placement = plan.placement
    decoded = {"jpeg_decoder": plan.config.decoder} if plan.config.decoder else {}
    return {
        "cluster": dataclasses.asdict(placement.cluster),
        "geometry": {name: getattr(plan.geometry, name) for name in _GEOMETRY},
        "task": plan.config.task.name,
        "samples_are": plan.task.samples_are,
        "metrics": {metric.name: metric.better for metric in plan.task.evaluated_metrics},
        "dataset": {"name": plan.task.data, **dataclasses.asdict(plan.dataset_size), **decoded},
        "updates_per_epoch": plan.updates_per_epoch,
        "total_updates": plan.total_updates,
        "instances": [{**dataclasses.asdict(spec), **_devices(placement, spec)} for spec in placement.instances],
        "legs": [dataclasses.asdict(segment) for segment in plan.segments()],
        "pipeline_splits": list(plan.pipeline_splits),
        "ipu_options": ipu_options.describe(plan.config),
        "run_dir": plan.run_dir,
    }


def topology_summary(plan: Plan) -> Dict[str, int]:
    """Return the counts of hosts, instances, replicas and IPUs for `summary.json`."""
    return {
        "hosts": len(plan.placement.hosts),
        "instances": plan.geometry.num_instances,
        "replicas": plan.geometry.total_replicas,
        "local_replicas": plan.geometry.local_replicas,
        "ipus_per_replica": plan.geometry.ipus_per_replica,
    }


def render(plan: Plan, width: Optional[int] = None, is_verbose: bool = False) -> str:
    """Return the plan as a table: the sizes, folded to `width` as by `render_brief`, and one line per instance.

    `is_verbose`: with the options of the SDK.
    """
    placement, geometry, training = plan.placement, plan.geometry, plan.config.training
    rows = [
        ("pod", f"{placement.cluster.name}: {counted(len(placement.hosts), 'host')} ({_names(placement.hosts)})"),
        *_file_rows(plan),
        (
            "placement",
            f"{counted(geometry.num_instances, 'instance')} x {counted(geometry.local_replicas, 'replica')} x "
            f"{counted(geometry.ipus_per_replica, 'IPU')} = {_total_ipus(plan)}",
        ),
        *_fleet_rows(plan),
        *_pipeline_rows(plan),
        *_cluster_rows(placement),
        *_elastic_rows(plan),
        *_core_rows(placement),
        (
            "global batch",
            f"{training.batch_size} (micro-batch) x {training.gradient_accumulation} (accumulation) x "
            f"{geometry.total_replicas} (replicas) = {geometry.global_batch_size} samples per update",
        ),
        (
            "call",
            f"{counted(training.device_iterations, 'update')}; each instance feeds "
            f"{geometry.combined_batch_size} samples",
        ),
        *_data_rows(plan),
        ("model", f"{plan.task.model}, precision {training.precision}, {training.optimizer}"),
        ("optimizer", _optimizer(plan)),
        (
            "length",
            f"{counted(plan.total_updates, 'update')}, {_per_epoch(plan)}, {counted(len(plan.segments()), 'segment')}",
        ),
        *_transfer_rows(plan),
        *(ipu_options.rows(plan.config) if is_verbose else ()),
        ("bits", _reproducibility(plan)),
        *_snapshot_rows(plan),
        *_standby_rows(plan),
        ("run folder", plan.run_dir),
    ]
    return "\n".join([*aligned(rows, width), "", *aligned(_instance_rows(placement))])


def render_brief(plan: Plan, width: Optional[int] = None) -> str:
    """Return what is trained, for how long and where, a line each; `render` has the rest.

    Args:
        plan: the plan.
        width: of a terminal in columns: longer texts are folded. None folds nothing.
    """
    placement, geometry, training = plan.placement, plan.geometry, plan.config.training
    hosts = placement.cluster.name
    if not placement.cluster.is_local:
        hosts += f": {counted(len(placement.hosts), 'host')} ({_names(placement.hosts)})"
    accumulation = training.gradient_accumulation
    steps = "" if accumulation == 1 else f" x {accumulation} (accumulation)"
    batch = f"{training.batch_size}{steps} x {counted(geometry.total_replicas, 'replica')}"
    left_out = _left_out(plan)
    epochs = f" ({counted(training.epochs, 'epoch')} of {plan.updates_per_epoch}{left_out and f'; {left_out}'})"
    is_cut = plan.total_updates != training.epochs * plan.updates_per_epoch
    size = f"{counted(geometry.num_instances, 'instance')} x {counted(geometry.local_replicas, 'replica')}"
    rows = [
        ("model", f"{plan.task.model}, precision {training.precision}, {training.optimizer}"),
        *_data_rows(plan),
        ("length", f"{counted(plan.total_updates, 'update')}{f', {_per_epoch(plan)}' if is_cut else epochs}"),
        ("global batch", f"{batch} = {geometry.global_batch_size} {plan.task.samples_are} per update"),
        *([("optimizer", _optimizer(plan))] if _scaling(plan) else ()),
        ("pod", hosts),
        *_file_rows(plan),
        ("placement", f"{size} x {counted(geometry.ipus_per_replica, 'IPU')} = {_total_ipus(plan)}"),
        *_fleet_rows(plan),
        *_oversubscription_rows(placement),
        *_pipeline_rows(plan),
        *_conflict_rows(placement),
        *_elastic_rows(plan),
        ("run folder", shown_path(plan.run_dir)),
    ]
    return "\n".join(aligned(rows, width))


def _optimizer(plan: Plan) -> str:
    scaling, training = _scaling(plan), plan.config.training
    schedule = f"{training.lr_schedule}, {counted(training.warmup_updates, 'update')} of warm-up"
    scaled = f"{scaling}; " if scaling else ""
    return f"{training.optimizer}, learning rate {training.learning_rate:.4g} ({scaled}{schedule})"


def _scaling(plan: Plan) -> Optional[str]:
    """Return how the default learning rate is scaled with the global batch; None if it is not."""
    training, geometry = plan.config.training, plan.geometry
    micro_batches = training.gradient_accumulation * geometry.total_replicas
    samples = rate_samples(training.optimizer, training.reduction, training.batch_size, micro_batches)
    return scaling_text(training.learning_rate, samples) if plan.has_default_rate else None


def render_topology(placement: Placement, num_ilds: Optional[int]) -> str:
    """Return a boxed table of host, IPU-Link domain (ILD), instance, replicas and IPUs, one line per instance."""
    rows: List[Sequence[str]] = [("host", "ILD", "instance", "replicas", "IPUs")]
    for spec in placement.instances:
        replicas = _short_range(spec.replica_offset, spec.local_replicas)
        ipus = _short_range(spec.index * placement.sizes.local_ipus, placement.sizes.local_ipus)
        domain = link_domain_index(spec, placement, num_ilds or 1)
        rows.append((spec.host, str(domain), str(spec.index), replicas, ipus))
    return "\n".join(format_table(rows, boxed=True))


def _total_ipus(plan: Plan) -> str:
    """Return the number of IPUs, and that of the cluster if it has more."""
    used, on_hosts = plan.geometry.total_ipus, [host.ipus or 0 for host in plan.placement.cluster.hosts]
    return counted(used, "IPU") + (f" of {sum(on_hosts)}" if used < sum(on_hosts) else "")


def _data_rows(plan: Plan) -> List[Tuple[str, str]]:
    size, kind = plan.dataset_size, plan.task.samples_are
    tested = f"{size.test_samples} test" if size.test_samples else f"NO test {kind}: nothing will be evaluated"
    published = " (published sizes; the files are missing)" if size.is_published else ""
    side = plan.config.image_side
    decoded = f", {side}x{side} pixels, decoded by {plan.config.decoder}" if side else ""
    text = f"{plan.task.data}: {size.train_samples} training, {tested}{published}{decoded}"
    return [("data", text), *(("", note) for note in size.notes)]


def _transfer_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return the rows for what moves the weights between a device and its host, besides checkpoints."""
    training, rows = plan.config.training, []
    during = sum(plan.is_evaluated_after(segment.end) for segment in plan.segments()[:-1])
    if during:
        rows.append(("evaluation", f"{counted(during, 'time')} during the training; on IPUs each {_moves(3, 2, 2)}"))
    if plan.dataset_size.test_samples:
        rows.append(("" if during else "evaluation", f"after the training; on IPUs it {_moves(2, 1, 1)}"))
    if training.ema is not None:
        rows.append(
            ("average", f"of the weights, which are read back every {counted(training.ema_interval, 'update')}")
        )
    return rows


def _moves(weights: int, optimizer: int, attaches: int) -> str:
    """Return what an evaluation costs an instance: PopTorch attaches one model at a time, with all of its state."""
    return (
        f"transfers the weights {weights} x and the optimizer state {optimizer} x per instance, and attaches a model "
        f"{attaches} x"
    )


def _per_epoch(plan: Plan) -> str:
    left_out = _left_out(plan)
    return f"{plan.updates_per_epoch} per epoch{left_out and f' ({left_out})'}"


def _left_out(plan: Plan) -> str:
    """Return how many samples of an epoch are too few for another call; "" for none."""
    samples = plan.dataset_size.train_samples
    left = samples - plan.updates_per_epoch * plan.geometry.global_batch_size
    return f"{left} of {samples} {plan.task.samples_are} left out of each" if left else ""


def _pipeline_rows(plan: Plan) -> List[Tuple[str, str]]:
    if plan.geometry.ipus_per_replica == 1:
        return []
    splits = ", ".join(f"IPU {stage.ipu} from {stage.module}" for stage in stages_of(plan.pipeline_splits))
    return [(plan.config.training.execution, splits or "split by the blocks of the model itself")]


def _file_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return a row for a cluster file that raypod contains: its hosts are examples."""
    path = plan.config.pod.cluster
    found = None if path is None else shipped.find(path, shipped.CLUSTERS)
    if path is None or found is None or found == Path(path):
        return []
    return [("cluster file", f"{found.name} of raypod; there is no file {path} here")]


def _cluster_rows(placement: Placement) -> List[Tuple[str, str]]:
    """Return the rows for idle hosts, the data network and the V-IPU partition."""
    cluster, rows = placement.cluster, []
    idle = cluster.hosts[len(placement.hosts) :]
    if idle:
        rows.append(("idle", f"{counted(len(idle), 'host')} without an instance ({_names(idle)})"))
    if cluster.data_network:
        rows.append(("data network", f"{cluster.data_network}: only rendezvous, Gloo and Horovod use it"))
    if cluster.vipu is not None:
        rows.append(("partition", _partition(cluster.vipu, placement)))
    return [*rows, *_conflict_rows(placement)]


def _conflict_rows(placement: Placement) -> List[Tuple[str, str]]:
    vipu = placement.cluster.vipu
    conflict = partition_conflict(vipu, placement) if vipu is not None else None
    return [("", f"a run on IPUs would fail: {conflict}")] if conflict else []


def _snapshot_rows(plan: Plan) -> List[Tuple[str, str]]:
    every = plan.config.run.snapshot_every
    if not every:
        return []
    text = "each host keeps two copies of the state in memory (--memory: how large they are)"
    return [("snapshots", f"every {counted(every, 'update')}: {text}")]


def _standby_rows(plan: Plan) -> List[Tuple[str, str]]:
    count = plan.config.run.standby
    if not count:
        return []
    what = "1 process" if count == 1 else f"{count} processes"
    return [("standby", f"{what} per host with SDK and data loaded (--memory: how large)")]


def _fleet_rows(plan: Plan) -> List[Tuple[str, str]]:
    """Return the row for an instance that runs without Ray, unless the command asks for that."""
    if not plan.is_inline or plan.config.run.fleet == "inline":
        return []
    return [("", "in this process, without Ray: if it dies, --resume continues (--fleet ray replaces a dead instance)")]


def _elastic_rows(plan: Plan) -> List[Tuple[str, str]]:
    if not plan.config.pod.is_elastic:
        return []
    plans = [
        f"{counted(each.geometry.total_replicas, 'replica')} x {each.geometry.gradient_accumulation} (accumulation) on "
        f"{counted(len(each.placement.hosts), 'host')}"
        for each in smaller_plans(plan)
    ]
    return [("elastic", f"while hosts are lost: {', or '.join(plans)}" if plans else "no smaller plan")]


def _core_rows(placement: Placement) -> List[Tuple[str, str]]:
    """Return the rows for the CPUs of a host and their division between its replicas."""
    spec, per_host, cpus = placement.instances[0], len(placement.instances_on(0)), placement.cpus_per_host
    replicas, threads = per_host * spec.local_replicas, counted(spec.threads_per_replica, "thread")
    bound = "; each instance is bound to its own, by NUMA node" if placement.cluster.numa else ""
    if cpus is None:
        return [("cores", f"{threads} per replica; the cluster file has no cpus_per_host{bound}")]
    text = f"{counted(cpus, 'CPU')} per host for {counted(replicas, 'replica')}: {cpus / replicas:.3g} per replica"
    rows = [("cores", f"{text}, {threads} each{bound}"), *_oversubscription_rows(placement)]
    at_a_time = max(1, cpus // per_host // spec.threads_per_replica)
    if not placement.oversubscription and at_a_time < spec.local_replicas:
        at_a_time_of = f"{at_a_time} of its {spec.local_replicas} replicas at a time"
        rows.append(("", f"an instance computes {at_a_time_of} (emulated SDK)"))
    return rows


def _oversubscription_rows(placement: Placement) -> List[Tuple[str, str]]:
    found = placement.oversubscription
    return [("", f"WARNING, oversubscribed: {found}")] if found else []


def _partition(vipu: VipuPartition, placement: Placement) -> str:
    gcds, domains = counted(num_gcds(vipu, placement), "GCD"), counted(vipu.link_domains, "IPU-Link domain")
    return f"{vipu.partition} at {vipu.server}:{vipu.port}: {gcds}, {domains}"


def _instance_rows(placement: Placement) -> List[List[str]]:
    """Return the header and one row per instance."""
    header = ["instance", "host", "local", "replicas", "threads"]
    has_ipus = placement.cluster.vipu is not None or any(host.ipus for host in placement.hosts)
    if has_ipus:
        header += ["IPUs", "ILD", "GCD", "device"]
    rows = [header]
    for spec in placement.instances:
        threads = spec.local_replicas * spec.threads_per_replica
        cells = [spec.index, spec.host, spec.local_index, _range(spec.replica_offset, spec.local_replicas), threads]
        if has_ipus:
            cells.append(_range(spec.index * placement.sizes.local_ipus, placement.sizes.local_ipus))
            cells += _devices(placement, spec).values()
        rows.append(["-" if cell is None else str(cell) for cell in cells])
    return rows


def _devices(placement: Placement, spec: InstanceSpec) -> Dict[str, Optional[int]]:
    """Return the IPU-Link domain, the graph compile domain and the device of an instance."""
    vipu = placement.cluster.vipu
    domains, gcds = (vipu.link_domains, num_gcds(vipu, placement)) if vipu else (1, 1)
    return {
        "link_domain": link_domain_index(spec, placement, domains),
        "gcd": gcd_index(spec, gcds),
        "device": device_id(spec, placement),
    }


def aligned(rows: Sequence[Sequence[str]], width: Optional[int] = None) -> List[str]:
    """Return the lines of a table whose first column is right-aligned.

    `width` folds the last column to a terminal of so many columns.
    """
    indent = max([_NAME_WIDTH, *(len(row[0]) for row in rows)])
    return format_table([(row[0].rjust(indent), *row[1:]) for row in rows], width=width)


def shown_path(path: str) -> str:
    """Return a path relative to the current folder, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _names(hosts: Sequence[Host]) -> str:
    if len(hosts) > _MAX_NAMES:
        return f"{hosts[0].name} to {hosts[-1].name}"
    return ", ".join(host.name for host in hosts)


def _range(first: int, count: int) -> str:
    return f"{first}..{first + count - 1}"


def _short_range(first: int, count: int) -> str:
    return str(first) if count == 1 else _range(first, count)


def _reproducibility(plan: Plan) -> str:
    if not plan.config.pod.threads_per_replica:
        return "specific to this placement: the threads per replica depend on the host's cores"
    if plan.geometry.is_aligned:
        return "the same for every placement of these replicas (emulated SDK)"
    return "the same for every placement; instances are not aligned with the reduction tree, which costs bandwidth"
