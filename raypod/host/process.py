"""The cores of a host's NUMA nodes, for instances that are bound to one (`--numa-aware`, `numa: true`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

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


# --- from host.allocator: The C allocator of an instance's process: it keeps freed memory, instead of giving it back between two kernels.
#
# A training step frees and asks again for the same large blocks. glibc returns them to the system and faults them in page
# by page, from other threads than the main one twice as often: 5 to 8 % of a step of ResNet-18 (measured).
#

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Set it, for this process, before it starts threads; whether this C library can be told (glibc can)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


# --- from record.versions: The versions of what a run computes with, for whoever looks at its files later.

_PACKAGES = ("raypod", "torch", "numpy", "ray", "poptorch")


def versions() -> Tuple[Tuple[str, str], ...]:
    """(name, version) of Python and of the packages that are installed."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def ticks_of(pid: int) -> Optional[int]:
    """When a process began, in the kernel's ticks since boot; None if there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def process_age_s() -> float:
    """Seconds since this process was started: the user has waited for the interpreter and the imports too."""
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # no Linux
        return 0.0
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")
