"""The load of this host and of processes: CPU, memory, network and disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Optional, Tuple

import psutil

from raypod.events import HostUsage

_MIN_INTERVAL_S = 0.5  # between two measurements; in between the previous one is returned
_ALL_FIELDS = 8  # of `psutil.cpu_times`; the later ones, guests, are a part of the first ones


class HostMeter:
    """Measures the load of this host; callable from several threads."""

    def __init__(self, folder: Optional[Path] = None) -> None:
        """`folder` is on the disk that is measured; default: the working folder."""
        self._folder = folder or Path.cwd()
        self._lock = threading.Lock()
        self._cpu_s: Optional[Tuple[float, float]] = None  # (busy, all) of all cores
        self._last: Optional[HostUsage] = None
        self._measured_s = 0.0

    def measure(self) -> Optional[HostUsage]:
        """Return the current load; None on a host that does not tell it."""
        with self._lock:
            if self._last is None or time.monotonic() - self._measured_s >= _MIN_INTERVAL_S:
                self._measured_s = time.monotonic()
                try:
                    self._last = self._measure()
                except (OSError, ValueError, LookupError, psutil.Error):
                    self._last = None
            return self._last

    def _measure(self) -> HostUsage:
        memory = psutil.virtual_memory()
        interfaces = psutil.net_io_counters(pernic=True, nowrap=False).items()
        network = [each for name, each in interfaces if name != "lo"]
        disk = psutil.disk_usage(os.fspath(self._folder))
        return HostUsage(
            cpu_share=self._cpu_share(),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            network_received_bytes=sum(each.bytes_recv for each in network),
            network_sent_bytes=sum(each.bytes_sent for each in network),
            disk_used_bytes=disk.used,
            disk_total_bytes=disk.total,
        )

    def _cpu_share(self) -> Optional[float]:
        times = psutil.cpu_times()
        total = sum(times[:_ALL_FIELDS])
        busy = total - times.idle - times.iowait
        before, self._cpu_s = self._cpu_s, (busy, total)
        if before is None or total <= before[1]:
            return None
        return min(1.0, max(0.0, (busy - before[0]) / (total - before[1])))


def cpu_seconds_of(pid: int) -> Optional[float]:
    """Return the CPU time of a process and of its children that have ended; None if it does not exist."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system + times.children_user + times.children_system
