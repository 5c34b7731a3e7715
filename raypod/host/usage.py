"""The load of this host, as Linux reports it below /proc: CPU, memory, network and disk."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Dict, Optional, Tuple

from raypod.events import HostUsage

_MIN_INTERVAL_S = 0.5  # between two measurements; in between the previous one is returned
_IDLE_FIELDS = (3, 4)  # of the line "cpu" of /proc/stat: idle, iowait


class HostMeter:
    """Measures the load of this host; callable from several threads."""

    def __init__(self, proc: Path = Path("/proc"), folder: Optional[Path] = None) -> None:
        """`folder` is on the disk that is measured; default: the working folder."""
        self._proc, self._folder = proc, folder or Path.cwd()
        self._lock = threading.Lock()
        self._ticks: Optional[Tuple[int, int]] = None  # (busy, all) of all cores
        self._last: Optional[HostUsage] = None
        self._measured_s = 0.0

    def measure(self) -> Optional[HostUsage]:
        """Return the current load; None on a host without these files."""
        with self._lock:
            if self._last is None or time.monotonic() - self._measured_s >= _MIN_INTERVAL_S:
                self._measured_s = time.monotonic()
                try:
                    self._last = self._measure()
                except (OSError, ValueError, LookupError):
                    self._last = None
            return self._last

    def _measure(self) -> HostUsage:
        memory = self._memory_bytes()
        received, sent = self._network_bytes()
        disk = shutil.disk_usage(os.fspath(self._folder))
        return HostUsage(
            cpu_share=self._cpu_share(),
            memory_used_bytes=memory["MemTotal"] - memory["MemAvailable"],
            memory_total_bytes=memory["MemTotal"],
            network_received_bytes=received,
            network_sent_bytes=sent,
            disk_used_bytes=disk.used,
            disk_total_bytes=disk.total,
        )

    def _cpu_share(self) -> Optional[float]:
        first_line = (self._proc / "stat").read_text().split("\n", 1)[0]
        fields = [int(field) for field in first_line.split()[1:9]]  # later fields are part of earlier ones
        total = sum(fields)
        busy = total - sum(fields[index] for index in _IDLE_FIELDS)
        before, self._ticks = self._ticks, (busy, total)
        if before is None or total <= before[1]:
            return None
        return min(1.0, max(0.0, (busy - before[0]) / (total - before[1])))

    def _memory_bytes(self) -> Dict[str, int]:
        found = {}
        for line in (self._proc / "meminfo").read_text().splitlines()[:4]:
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
        return found

    def _network_bytes(self) -> Tuple[int, int]:
        received = sent = 0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, figures = line.partition(":")
            if name.strip() != "lo":
                columns = figures.split()
                received, sent = received + int(columns[0]), sent + int(columns[8])
        return received, sent
