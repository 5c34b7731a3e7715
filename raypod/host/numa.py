"""The cores of a host's NUMA nodes, for instances that are bound to one (`--numa-aware`, `numa: true`)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import List, Optional, Sequence

_NODES = Path("/sys/devices/system/node")


def cpus_of_node(index: int, nodes: Path = _NODES) -> Optional[List[int]]:
    """Cores of NUMA node `index` modulo the number of nodes that have cores; None where there is but one."""
    found = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[len("node") :]))
    allowed = os.sched_getaffinity(0)
    lists = [[cpu for cpu in parse_cpu_list(path.read_text()) if cpu in allowed] for path in found]
    lists = [cpus for cpus in lists if cpus]
    return lists[index % len(lists)] if len(lists) > 1 else None


def bind_process(cpus: Sequence[int]) -> None:
    """Bind every thread that this process has, and so those that they start, to cores."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)


def parse_cpu_list(text: str) -> List[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8]."""
    cpus: List[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
