"""The cluster: the hosts of a pod and their settings, from a cluster YAML file or a list of hosts.

`cluster_file.py` parses and checks the file. Without a file, the cluster is this host.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import yaml

from raypod.errors import ClusterError
from raypod.plan import cluster_file, shipped
from raypod.plan.cluster_file import ClusterFile, Mistake
from raypod.plan.unique_keys import syntax_error

GCS_PORT = 6379  # default port of `ray start --head`
IPU_RESOURCE = r'"IPU"\s*:\s*(\d+)'  # in the start commands: the number of IPUs of a host


@dataclasses.dataclass(frozen=True)
class Host:
    """One host. `ipus`, `cpus` and `slots` are None if the cluster file, or the host list, does not state them."""

    name: str
    address: str
    ipus: Optional[int] = None
    cpus: Optional[int] = None
    slots: Optional[int] = None  # most instances


@dataclasses.dataclass(frozen=True)
class VipuPartition:
    """A V-IPU partition and the address of its controller."""

    partition: str
    server: str = "localhost"
    port: int = 8090
    timeout_s: int = 120
    allocation: Optional[str] = None
    size: Optional[int] = None  # IPUs; None: as many as the run needs
    gcds: Optional[int] = None  # graph compile domains; None: one per instance
    link_domains: int = 1


@dataclasses.dataclass(frozen=True)
class Ssh:
    """The ssh settings for commands on the hosts."""

    user: Optional[str] = None
    private_key: Optional[str] = None
    proxy_command: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts in the order of the file, the head first; instances are placed in this order."""

    name: str
    hosts: Tuple[Host, ...]
    instances_per_host: int = 1
    data_network: Optional[str] = None  # CIDR of the network between instances; None: Ray's addresses
    numa: bool = False  # bind the instances of a host to their own cores, by NUMA node
    sdk: Optional[str] = None  # folder of the Poplar SDK on the hosts
    python: str = "python3"  # interpreter on the hosts
    folder: Optional[str] = None  # folder of raypod on the hosts
    vipu: Optional[VipuPartition] = None
    ssh: Ssh = Ssh()
    gcs_port: Optional[int] = None  # of the head; None if the file has no start commands
    auth_mode: Optional[str] = None  # RAY_AUTH_MODE in the start commands
    is_local: bool = False  # no pod, only this host

    @property
    def num_instances(self) -> int:
        """The number of instances that the file requests."""
        return len(self.hosts) * self.instances_per_host

    @property
    def gcs_address(self) -> Optional[str]:
        """host:port of the GCS server on the head; None if the port is unknown."""
        return f"{self.hosts[0].address}:{self.gcs_port}" if self.gcs_port else None


LOCAL = Cluster("this host", (Host("localhost", "localhost"),), is_local=True)


def read_cluster(path: Optional[str]) -> Cluster:
    """Return the cluster of a YAML file, or this host if `path` is None.

    Raises:
        ClusterError: the file cannot be read or has mistakes; the message lists all of them.
    """
    return LOCAL if path is None else cluster_from(read_file(path), path)


def read_file(path: str) -> ClusterFile:
    """Return a parsed file without mistakes.

    Raises:
        ClusterError: see `read_cluster`.
    """
    try:
        file = cluster_file.parse(shipped.find(path, shipped.CLUSTERS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        others = shipped.hint(path, shipped.CLUSTERS)
        raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}{others}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the cluster file {path}: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        raise ClusterError(syntax_error(path, error)) from None
    except TypeError as error:
        raise ClusterError(f"{path}: expected the keys of a Ray cluster file, found {error}") from None
    raise_mistakes(path, file.mistakes)
    return file


def raise_mistakes(path: str, mistakes: List[Mistake]) -> None:
    """Raise one ClusterError for all mistakes, if there are any."""
    if len(mistakes) == 1:
        raise ClusterError(f"{path}, {mistakes[0]}")
    if mistakes:
        raise ClusterError("\n  ".join([f"{path} has {len(mistakes)} mistakes", *map(str, mistakes)]))


def cluster_from(file: ClusterFile, path: str) -> Cluster:
    """Return the cluster of a file without mistakes; the name defaults to that of `path`."""
    settings, auth = file.raypod, file.top.section("auth")
    start = file.commands("head_start_ray_commands")
    stated, cpus = settings.integer("ipus_per_host"), settings.integer("cpus_per_host")
    of_head, of_workers = (
        stated or number_in(commands, IPU_RESOURCE)
        for commands in (start, file.commands("worker_start_ray_commands") or start)
    )
    head, *workers = file.addresses
    hosts = (Host(head, head, of_head, cpus), *(Host(each, each, of_workers, cpus) for each in workers))
    return Cluster(
        name=file.top.text("cluster_name") or Path(path).stem,
        hosts=hosts,
        instances_per_host=settings.integer("instances_per_host") or 1,
        data_network=settings.text("data_network"),
        numa=settings.flag("numa"),
        sdk=settings.text("sdk"),
        python=settings.text("python") or Cluster.python,
        folder=settings.text("folder"),
        vipu=_vipu(file),
        ssh=Ssh(auth.text("ssh_user"), auth.text("ssh_private_key"), auth.text("ssh_proxy_command")),
        gcs_port=number_in(start, r"--port[= ](\d+)") or (GCS_PORT if "--head" in start else None),
        auth_mode=auth_mode_in(start),
    )


def _vipu(file: ClusterFile) -> Optional[VipuPartition]:
    section = file.raypod.section("vipu")
    partition = section.text("partition")
    if partition is None:
        return None
    return VipuPartition(
        partition=partition,
        server=section.text("server") or VipuPartition.server,
        port=section.integer("port") or VipuPartition.port,
        timeout_s=section.integer("timeout_s") or VipuPartition.timeout_s,
        allocation=section.text("allocation"),
        size=section.integer("size"),
        gcds=section.integer("gcds"),
        link_domains=section.integer("link_domains") or VipuPartition.link_domains,
    )


def number_in(commands: str, pattern: str) -> Optional[int]:
    """Return the number that matches in the start commands, the only place for resources and ports."""
    found = re.search(pattern, commands)
    return int(found.group(1)) if found else None


def auth_mode_in(commands: str) -> Optional[str]:
    """Return RAY_AUTH_MODE in the start commands; None if they do not set it."""
    found = re.search(r"\bRAY_AUTH_MODE=[\"']?(\w+)", commands)
    return found.group(1) if found else None


def cluster_of(hosts: str) -> Cluster:
    """Return the cluster of a host list in poprun's notation (`a,b`, `host[0-2,4]`), or of the path of a host file.

    `name:N` limits a host to N instances. If this host is the only one, the cluster is LOCAL, or LOCAL with a limit.

    Raises:
        ClusterError: the list cannot be parsed, is empty, or has a host twice.
    """
    if "/" in hosts and Path(hosts).is_file():
        return cluster_of_file(hosts)
    return _cluster_of(hosts, _parse_hosts(hosts, f"host list {hosts!r}"))


def cluster_of_file(path: str) -> Cluster:
    """Return the cluster of a host file, whose lines are host lists; `slots=N` is `:N`, and # starts a comment.

    Raises:
        ClusterError: the file cannot be read, a line cannot be parsed, or the file has no host or has a host twice.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the host file {path}: {getattr(error, 'strerror', error)}") from None
    found: List[Tuple[Host, str]] = []
    for number, line in enumerate(lines, 1):
        words, where = line.partition("#")[0].split(), f"{path}, line {number}"
        slots: Optional[int] = None
        for word in words[1:]:
            if not re.fullmatch(r"(max[-_])?slots=[1-9]\d*", word):
                raise ClusterError(f"{where}: cannot parse {word!r}; a line is a host, as in: host0 slots=2")
            slots = min(slots or sys.maxsize, int(word.partition("=")[2]))
        found += _parse_hosts("".join(words[:1]), where, slots)
    return _cluster_of(path, found)


def _parse_hosts(text: str, where: str, slots: Optional[int] = None) -> List[Tuple[Host, str]]:
    """Return the hosts of a list, each with `where`; all names of this host have the address of LOCAL."""
    found = []
    for name in expand_hosts(text, where):
        limited = re.fullmatch(r"([^:]+):([1-9]\d*)", name)
        limit = int(limited.group(2)) if limited else slots
        name = limited.group(1) if limited else name
        if not cluster_file.is_host(name):
            raise ClusterError(f"{where}: {name!r} is neither a host name nor an IP address")
        is_own = name in ("localhost", "127.0.0.1", "::1", socket.gethostname())
        found.append((Host(name, LOCAL.hosts[0].address if is_own else name, slots=limit), where))
    return found


def _cluster_of(title: str, found: List[Tuple[Host, str]]) -> Cluster:
    """Return the cluster of hosts, given each with where it is listed."""
    if not found:
        raise ClusterError(f"no host in {title!r}")
    known: Dict[str, Tuple[Host, str]] = {}
    for host, where in found:
        first, first_where = known.setdefault(host.address, (host, where))
        if first is not host:
            name = f" as {first.name}" if first.name != host.name else ""
            at = f" in {first_where}" if first_where != where else ""
            raise ClusterError(f"{where}: host {host.name} is listed twice{name and ','}{name}{at}; list it once")
    hosts = tuple(host for host, _ in found)
    if [host.address for host in hosts] != [LOCAL.hosts[0].address]:
        return Cluster(title, hosts)
    return LOCAL if hosts[0].slots is None else dataclasses.replace(LOCAL, hosts=hosts)


def expand_hosts(text: str, where: str = "the host list") -> List[str]:
    """Expand ranges: `a,node[08-10,12].pod` -> a, node08.pod, node09.pod, node10.pod, node12.pod.

    Raises:
        ClusterError: a range cannot be parsed.
    """
    names: List[str] = []
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        found = re.fullmatch(r"([^\[\]]*)\[([0-9,\-]+)\]([^\[\]]*)", part)
        if found is None:
            if "[" in part or "]" in part:
                raise ClusterError(f"{where}: cannot parse the host {part!r}; write a range as in host[0-2,4]")
            names.append(part)
            continue
        before, ranges, after = found.groups()
        names += [f"{before}{number}{after}" for each in ranges.split(",") for number in _range(each, part, where)]
    return names


def _range(text: str, part: str, where: str) -> List[str]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
        raise ClusterError(f"{where}: cannot parse the range {text!r} of {part!r}; write it as in host[0-2,4]")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
