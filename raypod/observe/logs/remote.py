"""Log files on other hosts, if the run folder is not on a shared disk: mirrored into a folder of this host over ssh.

A thread per host appends what is new to the mirrors. A mirror has the offsets of its original; the part that is not
shown is not transferred. Every ssh command has a time limit.

The hosts on which the instances of a run wrote their logs, from `plan.json` and `events.jsonl`.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import mmap
import os
import shlex
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from raypod.observe.logs.sources import Selection
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.plan.cluster_file import is_host, is_user
from raypod.plan.layout import LAUNCH
from raypod.runtime import ssh
from raypod.system.files import read_object
from raypod.system.log_files import offset_at, read_marks, times_file


class Process(NamedTuple):
    """A process of an instance."""

    instance: int
    host: str
    pid: int


def launch_hosts(folder: Path) -> List[str]:
    """Return the host of each instance of a launch; [] for a training."""
    names = read_object(folder / LAUNCH).get("hosts")
    return [str(name) for name in names] if isinstance(names, list) else []


def cluster_in(plan: Mapping[str, Any]) -> Optional[Cluster]:
    """Return the hosts and the ssh settings of the cluster in a plan; None if the run used only this host.

    A run folder can come from anyone: its `ssh_proxy_command` is not executed, and none of its words is an option.
    """
    try:
        described = plan["cluster"]
        if described["is_local"]:
            return None
        hosts = tuple(Host(each["name"], each["address"]) for each in described["hosts"])
        settings = Ssh(**{**described["ssh"], "proxy_command": None})
        is_valid = all(is_host(host.address) for host in hosts) and (settings.user is None or is_user(settings.user))
        return Cluster(described["name"], hosts, ssh=settings) if is_valid else None
    except (KeyError, TypeError):  # a launch, or a file of another version
        return None


def has_proxy(plan: Mapping[str, Any]) -> bool:
    """Return whether a plan names an `ssh_proxy_command`."""
    cluster = plan.get("cluster")
    ssh_settings = cluster.get("ssh") if isinstance(cluster, dict) else None
    return isinstance(ssh_settings, dict) and bool(ssh_settings.get("proxy_command"))


def processes_in(records: Iterable[Mapping[str, Any]]) -> Tuple[List[Process], bool]:
    """Return the processes of all instances that the events name, without repetition, and whether all can be read."""
    found: Dict[Process, None] = {}
    is_complete = True
    for record in records:
        if record.get("event") in ("run_started", "repaired"):
            instances = record.get("instances", [])
            is_complete = is_complete and isinstance(instances, list)
            for each in instances if isinstance(instances, list) else ():
                try:
                    found[Process(int(each["instance"]), str(each["host"]), int(each["pid"]))] = None
                except (KeyError, TypeError, ValueError, OverflowError):  # written by another version
                    is_complete = False
    return list(found), is_complete


def elsewhere(folder: Path, cluster: Cluster, processes: Iterable[Process]) -> Tuple[Dict[str, List[int]], List[str]]:
    """Return the instances whose logs are on other hosts, by host, and the hosts that the cluster does not have.

    A log is on another host if the instance ran there, and the log in this folder has no output of its process: else
    the folder is on a shared disk.
    """
    hosts = {host.name: host for host in cluster.hosts}
    found: Dict[str, List[int]] = {}
    unknown: Dict[str, None] = {}
    for process in processes:
        host = hosts.get(process.host)
        if host is not None and ssh.is_local(host):
            continue
        if _has_output_of(folder / "logs" / f"instance-{process.instance}.log", process.pid):
            continue
        if host is None:
            unknown[process.host] = None
        elif process.instance not in found.setdefault(host.name, []):
            found[host.name].append(process.instance)
    return found, list(unknown)


def _has_output_of(log: Path, pid: int) -> bool:
    """Return whether a log has the line with which the output of a process begins."""
    try:
        with log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(f", pid {pid}: started on".encode()) >= 0
    except (OSError, ValueError):  # there is none, or it is empty
        return False


_TAG = "raypod-log"  # login shells print other lines
_MAX_BYTES = 4 << 20  # of one file in one command
_LIMIT_S = 30.0  # for a command
_INTERVAL_S, _RETRY_S = 2.0, 10.0
_SAME_CLOCK_S = 10.0  # a smaller difference between two clocks may be the time that ssh takes


@dataclasses.dataclass
class Mirror:
    """A log file on another host, and its copy."""

    instance: int
    remote: str  # path
    local: Path
    inode: str = ""  # of the original; empty until it was found
    begin: int = 0  # offset of the first byte that is shown
    ahead_s: int = 0  # of the host's clock before the clock of this one
    size_bytes: int = 0  # so much of the original is in the copy, or was left out at its beginning


class HostLogs:
    """The logs on one host. Its thread is a daemon: the end of this process does not wait for ssh."""

    def __init__(self, host: Host, settings: Ssh, mirrors: List[Mirror], selection: Selection) -> None:
        self.host, self.mirrors = host, mirrors
        self.synced = threading.Event()  # everything that the host had was copied, or the host is unreachable
        self.stopped = threading.Event()  # set by another thread: the mirrors are about to be removed
        self.problem = ""  # why the last command failed
        self._ssh, self._selection = settings, selection

    def start(self, follows: bool) -> None:
        """Copy in the background, once or until this process ends."""
        threading.Thread(target=self._run, args=(follows,), name=f"logs of {self.host.name}", daemon=True).start()

    def _run(self, follows: bool) -> None:
        while not self.stopped.is_set():
            began_s = time.monotonic()
            try:
                has_more = self._sync()
            except OSError as error:  # of the mirrors
                self.problem, has_more = str(error), False
            if has_more:
                continue
            self.synced.set()
            if not follows:
                return
            self.stopped.wait(_RETRY_S if self.problem else max(_INTERVAL_S, 4 * (time.monotonic() - began_s)))

    def _sync(self) -> bool:
        """Copy a part of each file; return whether the files have more."""
        new = [mirror for mirror in self.mirrors if not mirror.inode]
        if new and not self._find(new):
            return False
        known = [mirror for mirror in self.mirrors if mirror.inode]
        return bool(known) and self._fetch(known)

    def _find(self, mirrors: List[Mirror]) -> bool:
        """Find files and the offset at which their copies begin; return whether the host answered."""
        lines = self._ask([_find_command(each, self._selection.tail) for each in mirrors])
        if lines is None:
            return False
        for mirror in mirrors:
            fields = lines.get(mirror.instance)
            if fields is not None and len(fields) == 6:
                inode, size, modified_s, now_s, tail_bytes, times = fields
                ahead_s = int(int(now_s) - time.time())
                mirror.ahead_s = ahead_s if abs(ahead_s) > _SAME_CLOCK_S else 0
                times_file(mirror.local).write_bytes(_decoded(times))
                marks = [f"{each.unix_s - mirror.ahead_s} {each.size_bytes}\n" for each in read_marks(mirror.local)]
                times_file(mirror.local).write_text("".join(marks))
                self._begin(mirror, int(size), int(modified_s) - mirror.ahead_s, int(tail_bytes))
                mirror.inode = inode
        return True

    def _begin(self, mirror: Mirror, size: int, modified_s: int, tail_bytes: int) -> None:
        """Create the copy, with a hole for what is not shown."""
        begin, since_s = 0, self._selection.since_s
        if since_s is not None:
            begin = size if modified_s < since_s else offset_at(read_marks(mirror.local), since_s)
        if self._selection.tail is not None:
            begin = max(begin, size - tail_bytes)
        with mirror.local.open("wb") as file:
            file.truncate(begin)
        os.utime(str(mirror.local), (modified_s, modified_s))
        mirror.begin = mirror.size_bytes = begin

    def _fetch(self, mirrors: List[Mirror]) -> bool:
        lines = self._ask([_fetch_command(each) for each in mirrors])
        has_more = False
        for mirror in mirrors if lines is not None else ():
            fields = (lines or {}).get(mirror.instance)
            if fields is None or len(fields) < 3:  # it was removed
                continue
            inode, size, modified_s = fields[0], int(fields[1]), int(fields[2]) - mirror.ahead_s
            if inode != mirror.inode or size < mirror.size_bytes:  # replaced or truncated
                mirror.local.write_bytes(b"")
                mirror.inode, mirror.size_bytes, has_more = inode, 0, True
                continue
            data = _decoded(fields[3]) if len(fields) > 3 else b""
            with mirror.local.open("ab") as file:
                file.write(data)
            os.utime(str(mirror.local), (modified_s, modified_s))
            mirror.size_bytes += len(data)
            has_more = has_more or len(data) == _MAX_BYTES
        return has_more

    def _ask(self, commands: List[str]) -> Optional[Dict[int, List[str]]]:
        """Run shell commands on the host; return the fields that each printed, by instance, None without an answer."""
        script = "; ".join(commands)
        result = ssh.run_on(self.host, self._ssh, ["sh", "-c", f"{script}; echo {_TAG} end"], timeout_s=_LIMIT_S)
        found: Dict[int, List[str]] = {}
        is_complete = False
        for line in result.output.splitlines():
            words = line.split()
            if words[:1] == [_TAG] and words[1:]:
                is_complete = is_complete or words[1] == "end"
                if words[1].isdigit():
                    found[int(words[1])] = words[2:]
        self.problem = "" if is_complete else result.error or "its shell did not run the command"
        return found if is_complete else None


def _find_command(mirror: Mirror, tail: Optional[int]) -> str:
    log, times = shlex.quote(mirror.remote), shlex.quote(str(times_file(Path(mirror.remote))))
    tail_bytes = f"$(tail -n {tail} {log} | wc -c)" if tail is not None else "0"
    return (
        f"if s=$(stat -c '%i %s %Y' {log} 2>/dev/null); then "
        f"echo {_TAG} {mirror.instance} $s $(date +%s) {tail_bytes} =$(base64 -w0 {times} 2>/dev/null); fi"
    )


def _fetch_command(mirror: Mirror) -> str:
    log = shlex.quote(mirror.remote)
    part = f"tail -c +{mirror.size_bytes + 1} {log} | head -c {_MAX_BYTES} | base64 -w0"
    return (
        f"if s=$(stat -c '%i %s %Y' {log} 2>/dev/null); then "
        f"printf '%s ' {_TAG} {mirror.instance} $s; printf =; {part}; echo; fi"
    )


def _decoded(field: str) -> bytes:
    """Return the bytes of a field: base64 behind an equals sign, so that no field is empty."""
    try:
        return base64.b64decode(field[1:], validate=True)
    except binascii.Error:
        return b""
