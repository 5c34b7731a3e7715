"""The cluster: the hosts of a pod and their settings, from a cluster YAML file or a list of hosts.

`cluster_file.py` parses and checks the file. Without a file, the cluster is this host.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path
from typing import List, Optional, Tuple

import yaml

from raypod.errors import ClusterError
from raypod.plan import cluster_file
from raypod.plan.cluster_file import ClusterFile

GCS_PORT = 6379  # default port of `ray start --head`


@dataclasses.dataclass(frozen=True)
class Host:
    """One host. `ipus` and `cpus` are None if the cluster file does not state them."""

    name: str
    address: str
    ipus: Optional[int] = None
    cpus: Optional[int] = None


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
    numa: bool = False  # bind the instances of a host to its NUMA nodes
    sdk: Optional[str] = None  # folder of the Poplar SDK on the hosts
    python: str = "python3"  # interpreter on the hosts
    folder: Optional[str] = None  # folder of raypod on the hosts
    vipu: Optional[VipuPartition] = None
    ssh: Ssh = Ssh()
    gcs_port: Optional[int] = None  # of the head; None if the file has no start commands
    auth_mode: Optional[str] = None  # RAY_AUTH_MODE in the start commands

    @property
    def num_instances(self) -> int:
        """The number of instances that the file requests."""
        return len(self.hosts) * self.instances_per_host

    @property
    def gcs_address(self) -> Optional[str]:
        """host:port of the GCS server on the head; None if the port is unknown."""
        return f"{self.hosts[0].address}:{self.gcs_port}" if self.gcs_port else None


LOCAL = Cluster("this host", (Host("localhost", "localhost"),))


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
        file = cluster_file.parse(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the cluster file {path}: {getattr(error, 'strerror', error)}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except TypeError as error:
        raise ClusterError(f"{path}: expected the keys of a Ray cluster file, found {error}") from None
    raise_mistakes(path, file.mistakes)
    return file


def raise_mistakes(path: str, mistakes: List[cluster_file.Mistake]) -> None:
    """Raise one ClusterError for all mistakes, if there are any."""
    if len(mistakes) == 1:
        raise ClusterError(f"{path}, {mistakes[0]}")
    if mistakes:
        raise ClusterError("\n  ".join([f"{path} has {len(mistakes)} mistakes", *map(str, mistakes)]))


def cluster_from(file: ClusterFile, path: str) -> Cluster:
    """Return the cluster of a file without mistakes; the name defaults to that of `path`."""
    settings, auth = file.raypod, file.top.section("auth")
    start = file.commands("head_start_ray_commands")
    ipus = settings.integer("ipus_per_host") or _found(r'"IPU"\s*:\s*(\d+)', start)
    hosts = tuple(Host(address, address, ipus, settings.integer("cpus_per_host")) for address in file.addresses)
    mode = re.search(r"\bRAY_AUTH_MODE=[\"']?(\w+)", start)
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
        gcs_port=_found(r"--port[= ](\d+)", start) or (GCS_PORT if "--head" in start else None),
        auth_mode=mode.group(1) if mode else None,
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


def _found(pattern: str, text: str) -> Optional[int]:
    """Return the number that matches in the start commands, the only place for resources and ports."""
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None


def cluster_of(hosts: str) -> Cluster:
    """Return the cluster of a host list in poprun's notation (`a,b`, `host[0-2,4]`), or of a file with a host per line.

    A list with only this host is the cluster LOCAL.

    Raises:
        ClusterError: the list cannot be parsed, is empty, or has a host twice.
    """
    names = host_file(hosts) if "/" in hosts and Path(hosts).is_file() else expand_hosts(hosts)
    if not names:
        raise ClusterError(f"no host in {hosts!r}")
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(f"host {name} is listed {names.count(name)} times in {hosts!r}")
    if all(name in ("localhost", "127.0.0.1", socket.gethostname()) for name in names) and len(names) == 1:
        return LOCAL
    return Cluster(hosts, tuple(Host(name, name) for name in names))


def host_file(path: str) -> List[str]:
    """Return the hosts of a file: the first word of each line; # starts a comment.

    Raises:
        ClusterError: the file cannot be read.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the host file {path}: {getattr(error, 'strerror', error)}") from None
    return [line.split()[0] for line in (line.partition("#")[0] for line in lines) if line.strip()]


def expand_hosts(text: str) -> List[str]:
    """Expand ranges: `a,node[08-10,12].pod` -> a, node08.pod, node09.pod, node10.pod, node12.pod.

    Raises:
        ClusterError: a range cannot be parsed.
    """
    names: List[str] = []
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        found = re.fullmatch(r"([^\[\]]*)\[([0-9,\-]+)\]([^\[\]]*)", part)
        if found is None:
            if "[" in part or "]" in part:
                raise ClusterError(f"cannot parse the host {part!r}; write a range as in host[0-2,4]")
            names.append(part)
            continue
        before, ranges, after = found.groups()
        names += [f"{before}{number}{after}" for each in ranges.split(",") for number in _range(each, part)]
    return names


def _range(text: str, where: str) -> List[str]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
        raise ClusterError(f"cannot parse the range {text!r} of the hosts {where!r}; write it as in host[0-2,4]")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
