"""The plan for the eye: as a table for people, as plain data for programs, as five numbers for the summary."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

from raypod.plan import Geometry, Plan


def describe(plan: Plan) -> Dict[str, Any]:
    """The plan as plain data: what `--json` prints and `plan.json` holds."""
    geometry = plan.geometry
    derived = [name for name, kind in vars(Geometry).items() if isinstance(kind, property)]
    return {
        "cluster": dataclasses.asdict(plan.cluster),
        "geometry": {**dataclasses.asdict(geometry), **{name: getattr(geometry, name) for name in derived}},
        "dataset": {"name": plan.config.data.dataset, **dataclasses.asdict(plan.size)},
        "updates_per_epoch": plan.updates_per_epoch,
        "total_updates": plan.total_updates,
        "instances": [dataclasses.asdict(spec) for spec in plan.instances],
        "legs": [dataclasses.asdict(leg) for leg in plan.legs()],
        "run_dir": plan.run_dir,
    }


def topology(plan: Plan) -> Dict[str, int]:
    """The placement in five numbers, for the summary."""
    return {
        "hosts": len(plan.hosts),
        "instances": plan.geometry.num_instances,
        "replicas": plan.geometry.total_replicas,
        "local_replicas": plan.geometry.local_replicas,
        "ipus_per_replica": plan.geometry.ipus_per_replica,
    }


def render(plan: Plan) -> str:
    """The plan as a table for people."""
    geometry, training = plan.geometry, plan.config.training
    hosts = ", ".join(host.name for host in plan.hosts)
    rows: List[Tuple[str, str]] = [
        ("pod", f"{plan.cluster.name}: {_count(len(plan.hosts), 'host')} ({hosts})"),
        (
            "placement",
            f"{_count(geometry.num_instances, 'instance')} x {_count(geometry.local_replicas, 'replica')} x "
            f"{_count(geometry.ipus_per_replica, 'IPU')} = {_count(geometry.total_ipus, 'IPU')}",
        ),
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
        ("data", f"{plan.config.data.dataset}: {plan.size.train_samples} training, {plan.size.test_samples} test"),
        ("model", f"{training.model}, precision {training.precision}, {training.optimizer}"),
        (
            "length",
            f"{plan.total_updates} updates, {plan.updates_per_epoch} per epoch, {_count(len(plan.legs()), 'leg')}",
        ),
        ("bits", _same_bits(plan)),
        ("run folder", plan.run_dir),
    ]
    lines = [f"{name:>12}  {text}" for name, text in rows]
    lines.append("")
    lines.append(f"{'instance':>12}  {'host':<16}{'local':>5}  {'replicas':<10}{'threads':>7}")
    for spec in plan.instances:
        replicas = f"{spec.replica_offset}..{spec.replica_offset + spec.local_replicas - 1}"
        threads = spec.local_replicas * spec.threads_per_replica
        lines.append(f"{spec.index:>12}  {spec.host:<16}{spec.local_index:>5}  {replicas:<10}{threads:>7}")
    return "\n".join(lines)


def _same_bits(plan: Plan) -> str:
    if not plan.config.pod.threads_per_replica:
        return "those of this placement: the threads of a replica depend on the cores of its host"
    if plan.geometry.is_aligned:
        return "the same for every placement of these replicas (32.32, emulated SDK)"
    return "the same for every placement; this one is no aligned block of the reduction tree, which costs bandwidth"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
