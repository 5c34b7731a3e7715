"""The hosts of a pod, out of the same cluster YAML that `ray up` reads (provider type `local`).

What Ray's schema has no place for lies under its free-form `metadata` key: `metadata.raypod.ipus_per_host` and
`cpus_per_host`. Without a cluster file the pod is this host.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

from raypod.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Host:
    """One host server. `ipus` and `cpus` are None where only the host itself can tell."""

    name: str
    address: str
    ipus: Optional[int] = None
    cpus: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The hosts in the order of the file: the head first. Instances follow this order."""

    name: str
    hosts: Tuple[Host, ...]


LOCAL = Cluster("this host", (Host("localhost", "localhost"),))


def read_cluster(path: Optional[str]) -> Cluster:
    """The cluster of a YAML file, or this host when `path` is None.

    Raises:
        ClusterError: the file cannot be read, is not of provider `local`, or contradicts itself.
    """
    if path is None:
        return LOCAL
    document = _read(Path(path))
    provider = _section(document, "provider", path)
    if provider.get("type") != "local":
        raise ClusterError(f"{path}: provider.type is {provider.get('type')!r}; raypod reads clusters of type local")
    if not provider.get("head_ip"):
        raise ClusterError(f"{path}: provider.head_ip is missing")
    addresses = [str(address) for address in (provider["head_ip"], *(provider.get("worker_ips") or ()))]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ClusterError(f"{path}: host {address} is listed {addresses.count(address)} times")
    ours = _section(_section(document, "metadata", path), "raypod", path)
    ipus = _count(ours, "ipus_per_host", path) or _ipus_of_start_commands(document)
    cpus = _count(ours, "cpus_per_host", path)
    hosts = tuple(Host(address, address, ipus, cpus) for address in addresses)
    return Cluster(str(document.get("cluster_name", Path(path).stem)), hosts)


def cluster_of(hosts: str) -> Cluster:
    """The hosts of a list as poprun takes it: `a,b`, `host[0-2,4]`, both mixed; or a file with a host per line.

    Names of this host alone are this host, whether a Ray cluster runs or not.

    Raises:
        ClusterError: brackets that cannot be read, a host twice, or none at all.
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
    """The hosts of a file: the first word of each line; # begins a comment.

    Raises:
        ClusterError: it cannot be read.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ClusterError(f"cannot read the host file {path}: {error.strerror}") from None
    return [line.split()[0] for line in (line.partition("#")[0] for line in lines) if line.strip()]


def expand_hosts(text: str) -> List[str]:
    """`a,node[08-10,12].pod` -> a, node08.pod, node09.pod, node10.pod, node12.pod.

    Raises:
        ClusterError: brackets that cannot be read.
    """
    names: List[str] = []
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        found = re.fullmatch(r"([^\[\]]*)\[([0-9,\-]+)\]([^\[\]]*)", part)
        if found is None:
            if "[" in part or "]" in part:
                raise ClusterError(f"cannot read the host {part!r}; a range is written as in host[0-2,4]")
            names.append(part)
            continue
        before, ranges, after = found.groups()
        names += [f"{before}{number}{after}" for each in ranges.split(",") for number in _range(each, part)]
    return names


def _range(text: str, where: str) -> List[str]:
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
        raise ClusterError(f"cannot read the range {text!r} of the hosts {where!r}; it is written as in host[0-2,4]")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def _read(path: Path) -> Dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise ClusterError(f"{path}: expected the keys of a Ray cluster file, found {type(document).__name__}")
    return document


def _section(document: Dict[str, Any], key: str, path: str) -> Dict[str, Any]:
    part = document.get(key) or {}
    if not isinstance(part, dict):
        raise ClusterError(f"{path}: {key} must be a mapping, not {type(part).__name__}")
    return part


def _count(ours: Dict[str, Any], key: str, path: str) -> Optional[int]:
    value = ours.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{path}: metadata.raypod.{key} = {value!r} must be a whole number of at least 1")
    return value


def _ipus_of_start_commands(document: Dict[str, Any]) -> Optional[int]:
    """What the hosts will tell Ray: `ray start ... --resources='{"IPU":16}'` (provider local has no other place)."""
    commands = str(document.get("head_start_ray_commands", ""))
    found = re.search(r'"IPU"\s*:\s*(\d+)', commands)
    return int(found.group(1)) if found else None
