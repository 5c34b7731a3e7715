"""The cores of this host by NUMA node, and how they are divided between the instances and replicas that share it.

Pure functions of what Linux describes below /sys/devices/system and of the CPUs that this process may use (its
affinity, which a cgroup's cpuset, `taskset` and a batch system restrict).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Collection, Dict, List, Optional, Sequence, Tuple

from raypod.system.process import parse_cpu_list

_SYSTEM = Path("/sys/devices/system")


@dataclasses.dataclass(frozen=True)
class Core:
    """A core: its NUMA node, and the CPUs (hardware threads) of it that this process may use."""

    node: int
    cpus: Tuple[int, ...]


def usable_cores(system: Path = _SYSTEM, allowed: Optional[Collection[int]] = None) -> List[Core]:
    """Return the cores with a usable CPU, by NUMA node and number.

    Where the system describes neither nodes nor cores, each CPU is a core of node 0.

    Args:
        system: the folder that describes nodes and CPUs.
        allowed: the usable CPUs; default: the affinity of this process.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    node_of = {cpu: node for node, cpus in _nodes(system).items() for cpu in cpus}
    found: Dict[Tuple[int, ...], List[int]] = {}
    for cpu in usable:
        found.setdefault((node_of.get(cpu, 0), *_siblings(system, cpu)), []).append(cpu)
    return [Core(key[0], tuple(cpus)) for key, cpus in sorted(found.items(), key=lambda each: (each[0][0], each[1]))]


def divide(cores: Sequence[Core], parts: int) -> List[List[Core]]:
    """Divide cores between `parts` instances or replicas of this host; each gets at least one core.

    With at least as many parts as nodes, a part has cores of one node, and the nodes take turns, with numbers of parts
    in proportion to their cores; the parts of a node have disjoint cores, and share them if there are too few. With
    fewer parts than nodes, a part has whole nodes.

    Returns:
        The cores of each part.
    """
    nodes = [[core for core in cores if core.node == node] for node in sorted({core.node for core in cores})]
    if parts < len(nodes):
        blocks = [nodes[part * len(nodes) // parts : (part + 1) * len(nodes) // parts] for part in range(parts)]
        return [[core for node in block for core in node] for block in blocks]
    counts = [0] * len(nodes)
    places: List[Tuple[int, int]] = []  # of each part: its node, and its number there
    for _ in range(parts):
        node = min(range(len(nodes)), key=lambda each: ((counts[each] + 1) / len(nodes[each]), each))
        places.append((node, counts[node]))
        counts[node] += 1
    return [_share(nodes[node], number, counts[node]) for node, number in places]


def cpus_of(cores: Sequence[Core]) -> List[int]:
    """Return the CPUs of cores, in ascending order."""
    return sorted(cpu for core in cores for cpu in core.cpus)


def replica_cpus(cores: Sequence[Core], replicas: int, threads: int) -> List[List[int]]:
    """Return the CPUs of each replica that computes at the same time as the others; the remaining replicas wait.

    As many compute at the same time as there are CPUs for `threads` threads each, at least one.
    """
    at_a_time = max(1, min(replicas, len(cpus_of(cores)) // threads))
    if at_a_time > len(cores):  # several replicas on a core: one on each of its hardware threads
        cores = [Core(core.node, (cpu,)) for core in cores for cpu in core.cpus]
    return [cpus_of(part) for part in divide(cores, at_a_time)]


def _share(items: List[Core], number: int, parts: int) -> List[Core]:
    """Return share `number` of consecutive items; a single one, which others may have too, if there are too few."""
    first, end = number * len(items) // parts, (number + 1) * len(items) // parts
    return items[first : max(end, first + 1)]


def _nodes(system: Path) -> Dict[int, List[int]]:
    """Return the CPUs of each NUMA node."""
    files = (system / "node").glob("node[0-9]*/cpulist")
    return {int(path.parent.name[len("node") :]): parse_cpu_list(path.read_text()) for path in files}


def _siblings(system: Path, cpu: int) -> List[int]:
    """Return the hardware threads of the core of a CPU; only itself where they are unknown."""
    path = system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    return parse_cpu_list(path.read_text()) if path.is_file() else [cpu]
