"""The IPUs of this host and the processes on them, from Graphcore's `gc-monitor --json`, where it is installed.

inferred: the public documentation shows the tool's table, not its JSON. Every object with the number of an IPU counts,
at any depth, under the names of the table's columns.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import threading
import time
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from raypod.observe.monitor.model import Device
from raypod.observe.monitor.words import clean

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
            self.devices = ask()
            self._stopped.wait(_INTERVAL_S)


def ask() -> Optional[Tuple[Device, ...]]:
    """Run the tool once; None if it fails, prints something else or does not end within ten seconds."""
    try:
        done = subprocess.run(
            COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True
        ).stdout
        content = json.loads(done.decode(errors="replace"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return parse(content)


def parse(content: Any) -> Tuple[Device, ...]:
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
