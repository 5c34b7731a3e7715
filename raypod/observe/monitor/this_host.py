"""This host: its load, its IPUs, and all runs whose coordinator is here; and a run folder that is not among them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from raypod.observe.monitor.gc_monitor import GcMonitor
from raypod.observe.monitor.live_run import LiveRun, with_log_lines
from raypod.observe.monitor.log_lines import LastLines
from raypod.observe.monitor.model import HostFacts, Run, Usage
from raypod.observe.monitor.run_files import RunFiles
from raypod.observe.status import registry
from raypod.system.usage import HostMeter

_FIRST_ANSWER_S = 2.5  # to wait for, with `wait`


class ThisHost:
    """Follows everything on this host. `poll` is cheap: threads wait for the answers."""

    def __init__(self, interval_s: float, folder: Optional[Path] = None) -> None:
        """`folder` is a run folder that is shown in any case."""
        self._interval_s = interval_s
        self._folder = RunFiles(folder.resolve()) if folder is not None else None
        self._lines = LastLines()
        self._live: Dict[Tuple[int, int], LiveRun] = {}
        self._meter, self._devices = HostMeter(), GcMonitor()
        self._ended: List[LiveRun] = []
        self._shown: Dict[str, RunFiles] = {}  # runs that were live in this session, by folder
        self._known: Dict[str, Run] = {}  # their last live state

    def start(self) -> None:
        """Begin to follow."""
        self._meter.measure()
        self._devices.start()
        self._follow()

    def wait(self) -> None:
        """Wait, for a bounded time, for a first answer of all processes, and for a load since the first measurement."""
        deadline = time.monotonic() + _FIRST_ANSWER_S
        for each in self._live.values():
            each.first_try.wait(max(0.0, deadline - time.monotonic()))
        self._devices.wait(max(0.0, deadline - time.monotonic()))

    def poll(self) -> Tuple[HostFacts, List[Run]]:
        """Return the newest known facts and runs."""
        self._follow()
        runs = {run.run_dir: run for run in filter(None, (each.current() for each in self._live.values()))}
        if self._folder is not None:
            self._shown.setdefault(str(self._folder.folder), self._folder)
        for folder, files in self._shown.items():
            if folder not in runs:
                with contextlib.suppress(OSError):  # the folder was removed
                    runs[folder] = with_log_lines(self._completed(files.read()), self._lines)
        measured = self._meter.measure()
        usage = Usage(**dataclasses.asdict(measured)) if measured is not None else Usage()
        return HostFacts(socket.gethostname(), usage, self._devices.devices), list(runs.values())

    def stop(self) -> None:
        """End all threads."""
        following = [*self._live.values(), *self._ended]
        for each in following:
            each.stop()
        for each in following:
            each.join()
        self._devices.stop()

    def _completed(self, run: Run) -> Run:
        """Return a run with the facts that its files do not have, if it was live in this session."""
        known = self._known.get(run.run_dir)
        if known is None:
            return run
        kept = {name: getattr(known, name) for name in ("user", "samples_are", "program")}
        return dataclasses.replace(run, **kept)

    def _follow(self) -> None:
        """Start to follow new processes, and stop with those that are gone; their runs remain, as their files say."""
        entries = {(entry.pid, entry.port): entry for entry in registry.entries()}
        for key in self._live.keys() - entries.keys():
            ended = self._live.pop(key)
            ended.stop()
            self._ended.append(ended)
            last = ended.current()
            if last is not None:
                self._known[last.run_dir] = last
            self._shown.setdefault(ended.entry.run_dir, RunFiles(Path(ended.entry.run_dir)))
        for key in entries.keys() - self._live.keys():
            self._live[key] = LiveRun(entries[key], self._interval_s)
