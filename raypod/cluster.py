"""The hosts of a pod, out of the same cluster YAML that `ray up` reads (provider type `local`).

What Ray's schema has no place for lies under its free-form `metadata` key: `metadata.raypod.ipus_per_host` and
`cpus_per_host`. Without a cluster file the pod is this host.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

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
