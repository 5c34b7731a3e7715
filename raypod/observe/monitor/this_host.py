"""This host: its load, its IPUs and their processes (`gc-monitor`), and the runs whose coordinator is here.

inferred: the public documentation shows the tool's table, not its JSON. Every object with the number of an IPU counts,
at any depth, under the names of the table's columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from raypod.observe.monitor.log_lines import LastLines
from raypod.observe.monitor.model import Device, HostFacts, Run, Usage
from raypod.observe.monitor.run_source import LiveRun, RunFiles, with_log_lines
from raypod.observe.monitor.style import clean
from raypod.observe.status import endpoint
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
        entries = {(entry.pid, entry.port): entry for entry in endpoint.entries()}
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


COMMAND = ("gc-monitor", "--json")
_TIMEOUT_S, _INTERVAL_S = 10.0, 5.0
_MAX_IPU = 65536
# inferred: the spelling of the keys, in lower case with "_" for spaces.
_IDS, _PIDS = ("id", "ipu_id", "device_id", "ipu"), ("pid", "process_id")
_OWNERS, _PROGRAMS = ("user", "owner", "username"), ("command", "process", "program", "executable")


class GcMonitor:
    """Runs `gc-monitor` in the background, and keeps its last answer."""

    def __init__(self) -> None:
        self.devices: Optional[Tuple[Device, ...]] = None  # None: not installed, or without an answer
        self._stopped = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Begin to ask every five seconds, if the tool is installed."""
        if shutil.which(COMMAND[0]) is not None:
            self._thread = threading.Thread(target=self._run, name="gc-monitor", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the first answer is there, at most `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._thread is not None and self.devices is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self) -> None:
        """End the thread, which may still wait for the tool."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S + 1)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.devices = ask_gc_monitor()
            self._stopped.wait(_INTERVAL_S)


def ask_gc_monitor() -> Optional[Tuple[Device, ...]]:
    """Run the tool once; None if it fails, prints something else or does not end within ten seconds."""
    try:
        done = subprocess.run(
            COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True
        ).stdout
        content = json.loads(done.decode(errors="replace"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return parse_gc_monitor(content)


def parse_gc_monitor(content: Any) -> Tuple[Device, ...]:
    """Return the IPUs in the JSON, in order. Facts about one IPU in several places are joined."""
    found: Dict[int, Device] = {}
    for each in _objects(content):
        ipu = _number(_first(each, _IDS))
        if ipu is not None and ipu < _MAX_IPU:
            pid, known = _number(_first(each, _PIDS)), found.get(ipu, Device(ipu))
            found[ipu] = dataclasses.replace(
                known,
                pid=known.pid if pid is None else pid,
                owner=known.owner or _text(_first(each, _OWNERS)),
                program=known.program or _text(_first(each, _PROGRAMS)),
            )
    return tuple(found[ipu] for ipu in sorted(found))


def _objects(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, dict):
        yield {str(key).lower().replace(" ", "_"): value for key, value in content.items()}
    if isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _objects(value)


def _first(content: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((content[key] for key in keys if content.get(key) not in (None, "", [], {})), None)


def _number(value: Any) -> Optional[int]:
    text = str(value).strip() if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    return int(text) if text.isdigit() else None


def _text(value: Any) -> str:
    return clean(value) if isinstance(value, str) else ""
