"""All logs and events of a run as one stream of lines: what exists in the order of time, then what is added."""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterable, Iterator, List, Optional, Tuple

from raypod.errors import ConfigError, RunError
from raypod.observe.logs.remote import (
    HostLogs,
    Mirror,
    cluster_in,
    elsewhere,
    has_proxy,
    launch_hosts,
    processes_in,
)
from raypod.observe.logs.sources import EVENTS, LogSource, Selection, TimedLine, label_of, logs_in
from raypod.plan import layout
from raypod.plan.cluster import Host
from raypod.runs import event_text
from raypod.runs.growing_file import GrowingFile
from raypod.runs.run_folder import with_newest_update
from raypod.runs.run_state import RunEnd, RunEndWatch
from raypod.runtime import ssh
from raypod.system.command_line import printable, say
from raypod.system.files import read_object

_POLL_S = 0.2
_CLOCK = "%Y-%m-%d %H:%M:%S"  # of an event, in local time
_STATE_S = 30.0  # a run that starts writes its process into the folder within this time

Labelled = Tuple[float, str, bytes]  # time, label, line
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of ANSI: cyan, yellow, green, magenta, blue, and bright ones
_BOLD = 1


class Logs:
    """The logs of one run folder. The context removes the copies of logs of other hosts."""

    def __init__(self, folder: Path, selection: Selection) -> None:
        self._folder, self._selection = folder, selection
        self._plan = read_object(folder / layout.PLAN)
        self._cluster = cluster_in(self._plan)
        self._events = GrowingFile(folder / layout.EVENTS)
        self._sources: Dict[str, LogSource] = {}
        self._hosts: Dict[str, HostLogs] = {}
        self._mirrors: Dict[str, Mirror] = {}  # by label
        self._mirror_folder: Optional[Path] = None
        self._reported: Dict[str, str] = {}  # problems by host
        self._records: List[Dict[str, Any]] = []  # events that name processes of instances
        self._are_named = False

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self._hosts.values():
            host.stopped.set()
        if self._mirror_folder is not None:
            shutil.rmtree(str(self._mirror_folder), ignore_errors=True)

    def show(self, follows: bool) -> int:
        """Print the lines; with `follows` go on until the run ends, and return its exit code, else 0.

        Raises:
            BrokenPipeError: the reader of stdout is gone.
            RunError: the coordinator of the run died while its logs were followed.
        """
        watch = RunEndWatch(self._folder)
        events = list(self._new_events())
        self._open_hosts(follows)
        for host in self._hosts.values():
            host.synced.wait()
        self._report_problems()
        self._open_sources(exists=True)
        if not follows and not self._are_named:
            self._report_missing()
        if not (self._sources or self._hosts or follows):
            which = "no log" if self._selection.instances is None else "no log of these instances"
            self._warn("", f"{which} in {self._folder / 'logs'}; only a run under Ray and a launch write them")
        printer = Printer([*self._sources, *([EVENTS] if self._selection.kinds else [])])
        self._print_all(printer, events)
        end: Optional[RunEnd] = None
        began_s = time.monotonic()
        while follows and end is None:
            printer.wait(_POLL_S)
            if not watch.is_known and time.monotonic() - began_s > _STATE_S:
                raise ConfigError(f"logs --follow: {self._folder} names no process of a run: its end is unknown")
            end = watch.poll()  # before the last lines are read
            self._print_new(printer, follows)
        self._print_rests(printer)
        if end is None:
            return 0
        if end.exit_code is None:
            update = with_newest_update(self._folder, end.state).update
            raise RunError(f"the coordinator of {self._folder} died at update {update}")
        return end.exit_code

    def _print_all(self, printer: Printer, events: List[Labelled]) -> None:
        """Print what exists, in the order of time; the lines of one source keep their order."""
        if self._selection.tail is not None:
            events = events[len(events) - min(self._selection.tail, len(events)) :]
        streams = [_labelled(label, source.timed_lines()) for label, source in self._sources.items()]
        for _, label, line in heapq.merge(*streams, iter(events), key=lambda each: each[0]):
            printer.line(label, line)
        printer.flush()

    def _print_new(self, printer: Printer, follows: bool) -> None:
        """Print the lines since the last call, also those of new files, and those of instances on new hosts."""
        events = list(self._new_events())
        self._open_hosts(follows)
        self._report_problems()
        self._open_sources(exists=False)
        for label, source in self._sources.items():
            for line in source.new_lines():
                printer.line(label, line)
        for _, label, line in events:
            printer.line(label, line)
        printer.flush()

    def _print_rests(self, printer: Printer) -> None:
        for label, source in self._sources.items():
            rest = source.rest()
            if rest:
                printer.line(label, rest)
        printer.flush()

    def _new_events(self) -> Iterator[Labelled]:
        """Yield the new events that are selected; keep those that name processes."""
        for record in self._events.read_records().records:
            if record.get("event") in ("run_started", "repaired"):
                self._records.append(record)
                self._are_named = True
            unix_s = event_text.time_of(record)
            clock = time.strftime(_CLOCK, time.localtime(unix_s)) if unix_s is not None else "unknown time"
            time_s = unix_s or 0.0
            since_s = self._selection.since_s
            if str(record.get("event")) in self._selection.kinds and (since_s is None or time_s >= since_s):
                yield time_s, EVENTS, f"{clock} {event_text.text_of(record)}".encode()

    def _open_sources(self, exists: bool) -> None:
        """Open the files that are not open; those that `exists`ed at the start begin where the selection does."""
        for label, log in logs_in(self._folder, self._selection).items():
            if label not in self._sources:
                with contextlib.suppress(FileNotFoundError):
                    self._sources[label] = LogSource(label, log, self._selection, None if exists else 0)
        for label, mirror in self._mirrors.items():
            if label not in self._sources and mirror.inode:
                self._sources[label] = LogSource(label, mirror.local, self._selection, mirror.begin)

    def _open_hosts(self, follows: bool) -> None:
        """Begin to copy the logs that are on other hosts; called for each new set of processes."""
        if self._cluster is None or not self._records:
            return
        records, self._records = self._records, []
        processes, is_complete = processes_in(records)
        found, unknown = elsewhere(self._folder, self._cluster, processes)
        if not is_complete:
            events = self._folder / layout.EVENTS
            self._warn("", f"{events} names processes in an unknown form; their logs on other hosts are not shown")
        for name in unknown:
            self._warn(name, f"host {name} is not in {self._folder}/plan.json; logs on it are not shown")
        addresses = {host.name: host for host in self._cluster.hosts}
        for name, instances in found.items():
            new = [
                each for each in instances if self._selection.has(each) and label_of(each, name) not in self._mirrors
            ]
            if new:
                mirrors = [self._mirror(instance, name) for instance in new]
                logs = HostLogs(addresses[name], self._cluster.ssh, mirrors, self._selection)
                self._hosts[f"{name}/{len(self._hosts)}"] = logs
                logs.start(follows)

    def _mirror(self, instance: int, host: str) -> Mirror:
        if self._mirror_folder is None:
            self._mirror_folder = Path(tempfile.mkdtemp(prefix="raypod-logs-"))
        remote = f"{self._plan.get('run_dir', self._folder)}/logs/instance-{instance}.log"
        mirror = Mirror(instance, remote, self._mirror_folder / f"{len(self._mirrors)}.log")
        self._mirrors[label_of(instance, host)] = mirror
        return mirror

    def _report_problems(self) -> None:
        """Print one line for each host that cannot be read, and again only if the reason changes."""
        for logs in self._hosts.values():
            if logs.problem:
                numbers = ", ".join(str(mirror.instance) for mirror in logs.mirrors)
                text = f"host {logs.host.name}: {logs.problem}; the log of instance {numbers} there is not shown"
                if has_proxy(self._plan):
                    text += "; the ssh_proxy_command in a run folder is not executed: use --cluster FILE"
                self._warn(logs.host.name, text)

    def _report_missing(self) -> None:
        """Say where the logs of instances are that no event names, as those of a run that has failed in its start."""
        launched = launch_hosts(self._folder)
        hosts = self._cluster.hosts if self._cluster else [Host(name, name) for name in set(launched)]
        others = {host.name for host in hosts if not ssh.is_local(host) and host.name != socket.gethostname()}
        others -= {logs.host.name for logs in self._hosts.values() if logs.problem}
        shown = {label.split()[-1].partition("@")[0] for label in self._sources}
        missing: Dict[str, List[str]] = {}
        instances = [{"host": name} for name in launched] or self._plan.get("instances")
        for index, each in enumerate(instances if isinstance(instances, list) else ()):
            name = str(each.get("host")) if isinstance(each, dict) else None
            if name in others and self._selection.has(index) and str(index) not in shown:
                missing.setdefault(str(name), []).append(str(index))
        for name, numbers in missing.items():
            log = f"{self._plan.get('run_dir', self._folder)}/logs/instance-{numbers[0]}.log"
            self._warn(name, f"no log of instance {', '.join(numbers)} here: look on host {name}, as at {log}")

    def _warn(self, host: str, text: str) -> None:
        if self._reported.get(host) != text:
            self._reported[host] = text
            say(f"warning: {text}")


def _labelled(label: str, lines: Iterator[TimedLine]) -> Iterator[Labelled]:
    return ((time_s, label, line) for time_s, line in lines)


class Printer:
    """Writes lines to stdout; BrokenPipeError when its reader is gone."""

    def __init__(self, labels: Iterable[str]) -> None:
        """`labels` are those of the sources that are known; their prefixes have equal widths."""
        self._out: BinaryIO = sys.stdout.buffer
        self._is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = max(map(len, labels), default=0)
        self._prefixes: Dict[str, bytes] = {}

    def line(self, label: str, text: bytes) -> None:
        """Print one line; of a progress bar, which redraws its line with carriage returns, the last state."""
        prefix = self._prefixes.get(label)
        if prefix is None:
            prefix = self._prefixes[label] = self._prefix(label)
        self._out.write(prefix + printable(_last_state(text).decode(errors="replace")).encode() + b"\n")

    def flush(self) -> None:
        """Pass the lines to the reader."""
        self._out.flush()

    def wait(self, seconds: float) -> None:
        """Sleep. Raise BrokenPipeError as soon as the reader of stdout is gone, also if nothing is to be printed."""
        poll = select.poll()
        try:
            poll.register(self._out.fileno(), 0)  # errors are always reported
        except OSError:  # stdout is no descriptor
            time.sleep(seconds)
            return
        if any(happened & (select.POLLERR | select.POLLNVAL) for _, happened in poll.poll(seconds * 1000)):
            raise BrokenPipeError

    def _prefix(self, label: str) -> bytes:
        text = printable(f"{label:<{self._width}} | ")
        if not self._is_coloured:
            return text.encode()
        digits = "".join(filter(str.isdigit, label.split("@")[0]))
        colour = _COLOURS[int(digits) % len(_COLOURS)] if digits else _BOLD
        return f"\x1b[{colour}m{text}\x1b[0m".encode()


def _last_state(line: bytes) -> bytes:
    if b"\r" not in line:
        return line
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
