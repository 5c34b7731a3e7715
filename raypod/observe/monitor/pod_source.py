"""The pod that is shown: this host alone, or all hosts of a cluster file, each asked through ssh."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from raypod.observe.monitor.log_lines import LogTail, RemoteLog
from raypod.observe.monitor.model import (
    Device,
    HostFacts,
    HostView,
    Instance,
    Ipu,
    Pod,
    RateMeter,
    Run,
    Usage,
    from_json,
)
from raypod.observe.monitor.style import clean
from raypod.observe.monitor.this_host import ThisHost
from raypod.plan.cluster import Cluster, Host
from raypod.runtime import ssh
from raypod.system.files import parse_json
from raypod.system.interfaces import interface_addresses

_CONNECT_S = 15.0


class PodSource:
    """Follows the pod until `stop`; a context manager."""

    def __init__(self, interval_s: float, folder: Optional[Path] = None, cluster: Optional[Cluster] = None) -> None:
        """Show this host, with the run in `folder`, or the hosts of a cluster."""
        self._cluster = cluster
        self._local: Dict[str, Host] = {}  # of the cluster
        self._this_host = ThisHost(interval_s, folder)
        self._remotes: List[RemoteHost] = []
        self._rates = RateMeter()
        for host in cluster.hosts if cluster is not None else ():
            if ssh.is_local(host):
                self._local[host.name] = host
            elif cluster is not None:
                self._remotes.append(RemoteHost(cluster, host, interval_s))
        self.facts = HostFacts(socket.gethostname())  # of this host

    def __enter__(self) -> PodSource:
        self._this_host.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._remotes:
            each.stop()
        for each in self._remotes:
            each.join()
        self._this_host.stop()

    def wait(self) -> None:
        """Wait, for a bounded time, until every run and host has answered or failed."""
        self._this_host.wait()
        deadline = time.monotonic() + _CONNECT_S
        for each in self._remotes:
            each.first_try.wait(max(0.0, deadline - time.monotonic()))

    def log(self, run: Run, path: str) -> Union[LogTail, RemoteLog]:
        """Return a log file of a run, which is on the host of its coordinator."""
        host = next((each.host for each in self._remotes if each.host.name == run.host), None)
        if self._cluster is not None and host is not None:
            return RemoteLog(self._cluster, host, path)
        return LogTail(Path(path))

    def poll(self) -> Pod:
        """Return what is known now."""
        facts, runs = self._here()
        if self._cluster is None:
            return self._pod(facts.name, [facts], runs)
        known: Dict[str, HostFacts] = {}
        for host in self._cluster.hosts:
            known[host.name] = HostFacts(host.name, num_ipus=host.ipus)
        if self._local:
            name = next(iter(self._local))
            known[name] = dataclasses.replace(facts, name=name, num_ipus=known[name].num_ipus)
        else:  # an operator's machine
            runs = []
        for remote in self._remotes:
            name = remote.host.name
            found, theirs, problem = remote.poll()
            known[name] = dataclasses.replace(found, name=name, num_ipus=known[name].num_ipus, problem=problem)
            for run in theirs:
                named = with_names(run, {found.name: name})
                runs.append(dataclasses.replace(named, problem=named.problem or problem))
        return self._pod(self._cluster.name, list(known.values()), runs)

    def _here(self) -> Tuple[HostFacts, List[Run]]:
        facts, runs = self._this_host.poll()
        name = next(iter(self._local), facts.name)
        # With rates: the monitor of another host shows them.
        facts = dataclasses.replace(facts, usage=self._rated("", name, facts.usage, time.monotonic()))
        self.facts = facts
        names = dict.fromkeys([facts.name, *interface_addresses().values()], name)
        return facts, [with_names(run, names) for run in runs]

    def _pod(self, name: str, facts: List[HostFacts], runs: List[Run]) -> Pod:
        """Return the pod with the rates of its network counters."""
        now_s = time.monotonic()
        facts = [dataclasses.replace(each, usage=self._rated("", each.name, each.usage, now_s)) for each in facts]
        rated = []
        for run in runs:
            usage = {host: self._rated(run.run_dir, host, each, now_s) for host, each in run.hosts.items()}
            rated.append(dataclasses.replace(run, hosts=usage))
        return build_pod(name, time.time(), facts, rated)

    def _rated(self, source: str, host: str, usage: Usage, now_s: float) -> Usage:
        known = usage.network_received_bytes is not None and usage.received_bytes_per_s is None
        return self._rates.add(f"{source}:{host}", usage, now_s) if known else usage


IDLE, BUSY, LOST, NO_ANSWER = "idle", "busy", "lost", "no answer"
_LOCAL_NAMES = ("", "localhost", "127.0.0.1")


def build_pod(name: str, unix_s: float, facts: Sequence[HostFacts], runs: Iterable[Run]) -> Pod:
    """Return the pod; hosts of runs that no monitor looked at are added after the others.

    A host with a problem has no idle IPUs, and no load unless an instance works there: both would be invented.
    """
    ordered = sorted(runs, key=lambda run: (not run.is_active, -(run.started_unix_s or 0.0), run.run_dir))
    known = {each.name: each for each in facts}
    active = [run for run in ordered if run.is_active]
    for run in active:
        for host in [*(each.host for each in run.instances), *run.hosts]:
            known.setdefault(host, HostFacts(host))
    hosts = tuple(_host(index, each, active) for index, each in enumerate(known.values()))
    return Pod(name, unix_s, hosts, tuple(ordered))


def with_names(run: Run, names: Mapping[str, str]) -> Run:
    """Return a run whose hosts have the names by which the pod knows them.

    `names` maps the names of the monitor's host to the name in the pod. A host without a name is that of the
    coordinator.
    """
    coordinator = names.get(run.host, run.host)

    def named(host: str) -> str:
        return coordinator if host in _LOCAL_NAMES else names.get(host, host)

    instances = tuple(dataclasses.replace(each, host=named(each.host)) for each in run.instances)
    hosts = {named(host): usage for host, usage in run.hosts.items()}
    return dataclasses.replace(run, host=coordinator, instances=instances, hosts=hosts)


def _host(index: int, facts: HostFacts, runs: Sequence[Run]) -> HostView:
    usage = facts.usage
    if usage == Usage():
        usage = next((run.hosts[facts.name] for run in runs if facts.name in run.hosts), usage)
    rows = [row for run in runs for each in run.instances if each.host == facts.name for row in _ipus(run, each)]
    if facts.problem:
        works = any(row.state not in (LOST, NO_ANSWER) for row in rows)
        return HostView(facts.name, usage if works else Usage(), tuple(rows), facts.problem)
    if facts.devices is not None:
        rows = _joined(facts.devices, rows)
    elif facts.num_ipus:
        first, used = index * facts.num_ipus, {row.ipu for row in rows}
        if len(used) < facts.num_ipus:
            free = [each for each in range(first, first + facts.num_ipus) if each not in used]
            rows += [Ipu(each, IDLE) for each in free[: facts.num_ipus - len(used)]]
    return HostView(facts.name, usage, tuple(rows), facts.problem)


def _ipus(run: Run, instance: Instance) -> List[Ipu]:
    """Return the IPUs of an instance; none of a program that has ended."""
    if instance.state == IDLE or instance.state.startswith("exit code"):
        return []
    per_replica = max(1, instance.num_ipus // max(1, instance.num_replicas))
    return [
        Ipu(
            ipu=instance.first_ipu + offset,
            state=NO_ANSWER if run.problem else instance.state or run.phase or run.state,
            owner=run.user,
            run=run.name,
            instance=instance.instance,
            replica=instance.first_replica + offset // per_replica if instance.num_replicas else None,
            program=run.program,
            pid=instance.pid,
        )
        for offset in range(instance.num_ipus)
    ]


def _joined(devices: Sequence[Device], rows: Sequence[Ipu]) -> List[Ipu]:
    """Return a row per IPU that `gc-monitor` lists, with the run whose process is attached to it."""
    waiting: Dict[Optional[int], List[Ipu]] = {}
    for row in rows:
        waiting.setdefault(row.pid, []).append(row)
    found: List[Ipu] = []
    for device in devices:
        own = waiting.get(device.pid) if device.pid is not None else None
        if own:
            found.append(dataclasses.replace(own.pop(0), ipu=device.ipu))
        else:
            state = IDLE if device.pid is None else BUSY
            found.append(Ipu(device.ipu, state, owner=device.owner, program=device.program, pid=device.pid))
    return found + [row for each in waiting.values() for row in each]


def collapsed(rows: Sequence[Ipu]) -> List[Tuple[Ipu, Ipu]]:
    """Return (first, last) of each group of consecutive IPUs that work for the same instance."""
    groups: List[Tuple[Ipu, Ipu]] = []
    for row in rows:
        if groups:
            first, last = groups[-1]
            same = dataclasses.replace(row, ipu=last.ipu, replica=last.replica) == last
            if same and row.ipu == last.ipu + 1:
                groups[-1] = (first, row)
                continue
        groups.append((row, row))
    return groups


_RETRY_S = 10.0
_SILENT_INTERVALS, _SILENT_S = 3, 5.0  # without a line: the host is shown as silent
_END_S = 3.0
_MAX_LINE = 64 << 20
_NO_CONNECTION = 255  # the exit code of ssh itself


class RemoteHost:
    """The newest known state of a host. A connection that ends is opened again after ten seconds."""

    def __init__(self, cluster: Cluster, host: Host, interval_s: float) -> None:
        self.host = host
        self.first_try = threading.Event()
        self._interval_s, self._ssh = interval_s, cluster.ssh
        words = [cluster.python, "-m", "raypod", "monitor", "--json", "--follow", "--interval", f"{interval_s:g}"]
        self._command = [*ssh.ssh_command(host, cluster.ssh), ssh.login_command(words)]
        self._state: Optional[Tuple[HostFacts, List[Run]]] = None
        self._received_s = time.monotonic()
        self._problem = "connecting"
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"monitor of {host.name}", daemon=True)
        self._thread.start()

    def poll(self) -> Tuple[HostFacts, List[Run], Optional[str]]:
        """Return the newest facts and runs of the host, and why they are not current, if so."""
        facts, runs = self._state or (HostFacts(self.host.name), [])
        problem, silent_s = self._problem, time.monotonic() - self._received_s
        if not problem and silent_s > max(_SILENT_S, _SILENT_INTERVALS * self._interval_s):
            problem = f"no data for {silent_s:.0f} s"
        return facts, runs, problem or None

    def stop(self) -> None:
        """End the connection."""
        self._stopped.set()
        process = self._process
        if process is not None:
            process.terminate()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(_END_S + 1)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            self._problem = self._problem or "connecting"
            try:
                self._problem = self._read_all()
            except OSError as error:
                self._problem = f"ssh: {error.strerror}"
            self.first_try.set()
            self._stopped.wait(_RETRY_S)

    def _read_all(self) -> str:
        """Read until the connection ends; return why it did."""
        with subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            self._process = process
            errors: List[str] = []
            assert process.stdout is not None
            assert process.stderr is not None
            reader = threading.Thread(target=_collect, args=(process.stderr, errors), daemon=True)
            reader.start()
            if self._stopped.is_set():
                process.terminate()
            for line in iter(lambda: process.stdout.readline(_MAX_LINE), b""):  # type: ignore[union-attr]
                self._take(line)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            reader.join(_END_S)
        self._process = None
        code = process.returncode
        if code == _NO_CONNECTION:
            cause = errors[-1] if errors else "ssh: no connection"
            return f"unreachable ({cause}{ssh.passphrase_hint(cause, self._ssh)})"
        return errors[-1] if errors else f"the monitor there ended with exit code {code}"

    def _take(self, line: bytes) -> None:
        """Store the state of a line; login shells print others."""
        text = line.decode(errors="replace")
        try:
            self._state = from_json(parse_json(text[text.index("{") :]))
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        self._received_s, self._problem = time.monotonic(), ""
        self.first_try.set()


def _collect(stream: IO[bytes], lines: List[str]) -> None:
    """Keep the last line that is not empty."""
    for line in iter(lambda: stream.readline(4096), b""):
        text = clean(line.decode(errors="replace"))
        if text:
            lines[:] = [text]
