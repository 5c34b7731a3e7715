"""The state of a launch, folded from the reports of its hosts: its status endpoint, and its metrics for Prometheus.

`add` runs in the launcher's main thread, `snapshot` in any other one. They share counters and references to immutable
objects, so that no lock is needed.

`launch.json` in the run folder of a launch: the launching process, its command, its status endpoint and its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from raypod.errors import RaypodError
from raypod.events import HostUsage
from raypod.observe.status.endpoint import cached_route, snapshot_route
from raypod.observe.status.prometheus import (
    COUNTER,
    GAUGE,
    HOST_METRICS,
    Labels,
    Metric,
    Sample,
    Scrape,
    by_instance,
    families,
    instance_labels,
    metrics_response,
    one,
    render,
    run_label,
)
from raypod.observe.status.run_status import VERSION, user_name
from raypod.observe.status.token_server import Response, Route
from raypod.plan.layout import LAUNCH
from raypod.plan.placement import InstanceSpec, Placement
from raypod.runs.event_log import raypod_version
from raypod.runs.run_state import DONE, RUNNING, end_of
from raypod.runtime.launcher.records import STDERR, STDOUT, HostReport, ProgramEnd, ProgramUsage
from raypod.system.command_line import printable
from raypod.system.files import HeldFolder, replace_file, strict_json
from raypod.system.process import process_start_ticks
from raypod.system.signals import on_abort

_TAIL_BYTES = 1024
_MAX_LINE = 200  # characters of the last line
_STREAMS = {STDOUT: "stdout", STDERR: "stderr"}


class _Output:
    """What a program has written."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(_STREAMS, 0)
        self.last_unix_s: Optional[float] = None
        self.tail = b""

    def add(self, stream: int, data: bytes) -> None:
        self.bytes[stream] += len(data)
        self.last_unix_s = time.time()
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def last_line(self) -> str:
        """Return the last line that is not empty, without control characters; of a progress bar, its last state."""
        text = self.tail.decode(errors="replace")
        states = [printable(each).strip() for each in re.split(r"[\r\n]", text)]
        return next((each for each in reversed(states) if each), "")[:_MAX_LINE]


class LaunchStatus:
    """The state of one launch. See docs/reference/observability.md for the keys of `snapshot`."""

    def __init__(self, placement: Placement, command: Sequence[str]) -> None:
        """`command` is the program with its arguments."""
        self._placement, self._command = placement, list(command)
        self.started_unix_s = time.time()
        self.run_dir: Optional[str] = None
        self.is_running = False  # the programs have been started
        self._output = {spec.index: _Output() for spec in placement.instances}
        self._processes: Dict[int, ProgramUsage] = {}
        self._ends: Dict[int, ProgramEnd] = {}
        self._usage: Dict[int, HostUsage] = {}  # by host index

    def add(self, host: int, report: HostReport) -> None:
        """Add a report of a host."""
        self.is_running = True
        for instance, stream, data in report.chunks:
            self._output[instance].add(stream, data)
        if report.programs:
            self._processes = {**self._processes, **{each.instance: each for each in report.programs}}
        if report.usage is not None:
            self._usage = {**self._usage, host: report.usage}
        if report.ends:
            self._ends = {**self._ends, **{end.instance: end for end in report.ends}}

    def snapshot(self) -> Dict[str, Any]:
        """Return the state as plain data."""
        hosts = [host.name for host in self._placement.hosts]
        usage = {name: self._usage.get(index) for index, name in enumerate(hosts)}
        instances = [self._instance(spec) for spec in self._placement.instances]
        return {
            "version": VERSION,
            "kind": "launch",
            "unix_s": time.time(),
            "started_unix_s": self.started_unix_s,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "user": user_name(),
            "run_dir": self.run_dir,
            "command": self._command,
            "phase": self._phase(instances),
            "instances": instances,
            "hosts": {name: each and dataclasses.asdict(each) for name, each in usage.items()},
        }

    def _phase(self, instances: Sequence[Mapping[str, Any]]) -> str:
        """Return "starting", "running", or "ending" when the first program has exited."""
        if not self.is_running:
            return "starting"
        return "ending" if any(each["exit_code"] is not None for each in instances) else "running"

    def _instance(self, spec: InstanceSpec) -> Dict[str, Any]:
        output, process, end = self._output[spec.index], self._processes.get(spec.index), self._ends.get(spec.index)
        sizes = self._placement.sizes
        return {
            "instance": spec.index,
            "host": spec.host,
            "pid": process.pid if process else None,
            "state": "exited" if end else "running" if self.is_running else "starting",
            "exit_code": end.exit_code if end else None,
            "cause": end.cause if end else None,
            "replicas": [spec.replica_offset, spec.local_replicas],
            "ipus": [spec.index * sizes.local_ipus, sizes.local_ipus],
            "cpu_s": process.cpu_s if process else None,
            "output_bytes": {name: output.bytes[stream] for stream, name in _STREAMS.items()},
            "last_output_unix_s": output.last_unix_s,
            "last_line": output.last_line(),
            "log_file": f"{self.run_dir}/logs/instance-{spec.index}.log" if self.run_dir else None,
        }


def _output_bytes(scrape: Scrape) -> List[Sample]:
    return [
        Sample(Labels((*instance_labels(each), ("stream", name))), count)
        for each in scrape.state["instances"]
        for name, count in each["output_bytes"].items()
    ]


def _info(scrape: Scrape) -> List[Sample]:
    state = scrape.state
    names = {"kind": state["kind"], "user": state["user"], "coordinator": state["host"], "run_dir": state["run_dir"]}
    names.update(program=state["command"][0], version=raypod_version() or "")
    return [Sample(Labels(names.items()), 1)]


METRICS = (
    Metric("raypod_info", GAUGE, "Facts about the launch as labels; the value is 1.", _info),
    Metric(
        "raypod_start_time_seconds",
        GAUGE,
        "Time at which the launch began, in seconds since 1970.",
        one("started_unix_s"),
    ),
    Metric(
        "raypod_program_up",
        GAUGE,
        "1 if the program of an instance runs, else 0.",
        by_instance(lambda each: int(each["state"] == "running")),
    ),
    Metric(
        "raypod_program_exit_code",
        GAUGE,
        "Exit code of the program of an instance, 128 + n for signal n.",
        by_instance("exit_code"),
    ),
    Metric(
        "raypod_program_cpu_seconds_total",
        COUNTER,
        "CPU time of the process of a program and of its children that have ended.",
        by_instance("cpu_s"),
    ),
    Metric("raypod_program_output_bytes_total", COUNTER, "Bytes that a program has written.", _output_bytes),
    Metric(
        "raypod_program_last_output_timestamp_seconds",
        GAUGE,
        "Time of the last output of a program, in seconds since 1970.",
        by_instance("last_output_unix_s"),
    ),
    *HOST_METRICS,
)


def scrape_response(status: LaunchStatus) -> Response:
    """Return the response to a scrape of a launch."""
    found = families(METRICS, Scrape(status.snapshot(), {}))
    return metrics_response(render(found, run_label(status.run_dir or "")))


def routes_of(status: LaunchStatus) -> Dict[str, Route]:
    """Return the routes of the status endpoint of a launch."""
    return {"/status": snapshot_route(status.snapshot), "/metrics": cached_route(lambda: scrape_response(status))}


class LaunchFile:
    """Writes the file at the start and at the end of a launch. A full disk does not end the launch.

    Attributes:
        exit_code: of a launch that ends without an exception.
    """

    def __init__(self, folder: Path, command: Sequence[str], hosts: Sequence[str]) -> None:
        """`hosts` holds the host of each instance, in instance order."""
        self._path, self.exit_code = folder / LAUNCH, 0
        self._folder = HeldFolder(folder)
        self._content: Dict[str, Any] = {
            "pid": os.getpid(),
            "started_ticks": process_start_ticks(os.getpid()) or 0,  # in clock ticks since boot: pids are reused
            "host": socket.gethostname(),
            "started_unix_s": time.time(),
            "command": list(command),
            "hosts": list(hosts),
        }
        self._stack = contextlib.ExitStack()
        self._write(state=RUNNING)

    def serve_status(self, port: int, token_file: str) -> None:
        self._write(status_port=port, status_token_file=token_file)

    def __enter__(self) -> LaunchFile:
        self._stack.enter_context(on_abort(self._record_end))
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        self._stack.close()
        self._record_end(error)
        self._folder.close()

    def _record_end(self, error: Optional[BaseException]) -> None:
        state, exit_code, message = (DONE, self.exit_code, "") if error is None else end_of(error)
        if not isinstance(error, RaypodError):
            exit_code = getattr(error, "exit_code", exit_code)  # of a signal
        self._content.pop("status_port", None)
        self._content.pop("status_token_file", None)
        self._write(state=state, exit_code=exit_code, message=message)

    def _write(self, **changed: Any) -> None:
        self._content.update(changed)
        with contextlib.suppress(OSError):
            replace_file(self._path, (strict_json({**self._content, "written_at_s": time.time()}) + "\n").encode())
