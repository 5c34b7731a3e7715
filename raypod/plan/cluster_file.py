"""A cluster YAML as plain values: every mistake is found in one pass, with its line.

The file is the one of `ray up` (provider type `local`). What Ray's schema has no place for lies under its free-form
`metadata` key, as `metadata.raypod`. `cluster.py` makes the values of a cluster out of what is read here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any, Dict, Iterable, List, Optional, Tuple

import yaml

from raypod.cli import suggestion

# What `ray up` takes at the top (ray-schema.json; min_workers: autoscaler/_private/local/config.py, provider local).
TOP = (
    *("cluster_name", "min_workers", "max_workers", "upscaling_speed", "idle_timeout_minutes", "provider", "auth"),
    *("docker", "file_mounts", "cluster_synced_files", "file_mounts_sync_continuously", "rsync_exclude"),
    *("rsync_filter", "metadata", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands", "no_restart"),
)
_NOT_LOCAL = ("available_node_types", "head_node_type", "head_node", "worker_nodes")
_PROVIDER = ("type", "head_ip", "worker_ips", "external_head_ip", "cache_stopped_nodes", "disable_node_updaters")
_AUTH = ("ssh_user", "ssh_private_key", "ssh_public_key", "ssh_proxy_command", "ssh_proxy_use_node_id")
_OURS = (
    *("ipus_per_host", "instances_per_host", "cpus_per_host", "data_network", "numa", "sdk", "python", "folder"),
    "vipu",
)
_VIPU = ("server", "port", "timeout_s", "partition", "allocation", "size", "gcds", "link_domains")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Something to correct, or to know, and its line (1-based)."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class Section:
    """A mapping of the file that remembers its lines. What is wrong with a value is noted, and the value is None."""

    def __init__(self, name: str, line: int, entries: Dict[str, Tuple[Any, int]], mistakes: List[Mistake]) -> None:
        self.name, self.line, self._entries, self._mistakes = name, line, entries, mistakes

    def __contains__(self, key: str) -> bool:
        return self._entries.get(key, (None, 0))[0] is not None

    def note(self, key: str, text: str) -> None:
        """Note a mistake at the line of a key, or of the section where the key is missing."""
        self._mistakes.append(Mistake(self.line_of(key), text))

    def line_of(self, key: str) -> int:
        """The line of a key; of the section if there is no such key."""
        return self._entries[key][1] if key in self._entries else self.line

    def value(self, key: str) -> Any:
        """The value as YAML gives it; None where there is none."""
        return self._entries.get(key, (None, 0))[0]

    def check_keys(self, known: Iterable[str]) -> None:
        """Note every key that is not known, with its nearest neighbour."""
        known = list(known)
        for key in self._entries:
            if key not in known:
                self.note(key, f"unknown key {self._full(key)}{suggestion(key, known)}")

    def section(self, key: str) -> Section:
        """A mapping below a key; an empty one where there is none, or something else."""
        value, line = self._entries.get(key, (None, self.line))
        if isinstance(value, Section):
            return value
        if value is not None:
            self.note(key, f"{self._full(key)} must be a mapping, not {_kind(value)}")
        return Section(self._full(key), line, {}, self._mistakes)

    def text(self, key: str) -> Optional[str]:
        """A text; numbers are taken as they are written in short (an address may look like one)."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
            return str(value)
        self.note(key, f"{self._full(key)} = {_shown(value)} must be a text")
        return None

    def texts(self, key: str) -> Tuple[str, ...]:
        """A list of texts; one text stands for a list of one."""
        value = self.value(key)
        entries = [value] if isinstance(value, str) else value
        if entries is None:
            return ()
        if not isinstance(entries, list) or not all(isinstance(each, (str, int, float)) for each in entries):
            self.note(key, f"{self._full(key)} must be a list of texts")
            return ()
        return tuple(map(str, entries))

    def count(self, key: str, least: int = 1) -> Optional[int]:
        """A whole number of at least `least`."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.note(key, f"{self._full(key)} = {_shown(value)} must be a whole number of at least {least}")
            return None
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where there is nothing."""
        value = self.value(key)
        if not isinstance(value, (bool, type(None))):
            self.note(key, f"{self._full(key)} = {_shown(value)} must be true or false")
        return value is True

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


@dataclasses.dataclass(frozen=True)
class ClusterFile:
    """A file that has been read: its sections, and what is wrong with them."""

    top: Section
    mistakes: List[Mistake]

    @property
    def provider(self) -> Section:
        """What Ray knows of the hosts."""
        return self.top.section("provider")

    @property
    def raypod(self) -> Section:
        """What raypod knows beyond that."""
        return self.top.section("metadata").section("raypod")

    @property
    def addresses(self) -> Tuple[str, ...]:
        """The hosts, the head first."""
        head = self.provider.text("head_ip")
        return (*((head,) if head else ()), *self.provider.texts("worker_ips"))

    def commands(self, key: str) -> str:
        """The start commands of a kind, as one text."""
        value = self.top.value(key)
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")


def parse(text: str) -> ClusterFile:
    """Read and check the text of a file.

    Raises:
        yaml.YAMLError: it is not YAML.
        TypeError: it is YAML, and no mapping; the message says what it is.
    """
    mistakes: List[Mistake] = []
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise TypeError(_kind(loader.construct_document(node)) if node is not None else "nothing")
        top = _section("", node, loader, mistakes)
    finally:
        loader.dispose()
    file = ClusterFile(top, mistakes)
    _check_top(file)
    _check_provider(file)
    _check_ours(file)
    unique = {(mistake.line, mistake.text): mistake for mistake in mistakes}
    mistakes[:] = sorted(unique.values(), key=lambda mistake: mistake.line)
    return file


def _section(name: str, node: yaml.MappingNode, loader: yaml.SafeLoader, mistakes: List[Mistake]) -> Section:
    """A mapping and those below it, down to `metadata.raypod.*`; file_mounts and the like stay plain values."""
    loader.flatten_mapping(node)
    entries: Dict[str, Tuple[Any, int]] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_document(key_node)), key_node.start_mark.line + 1
        full = f"{name}.{key}" if name else key
        if key in entries:
            mistakes.append(Mistake(line, f"{full} is given twice, first in line {entries[key][1]}"))
        value: Any
        if isinstance(value_node, yaml.MappingNode) and full not in ("file_mounts", "docker"):
            value = _section(full, value_node, loader, mistakes)
        else:
            value = loader.construct_document(value_node)
        entries[key] = (value, line)
    return Section(name, node.start_mark.line + 1, entries, mistakes)


def _check_top(file: ClusterFile) -> None:
    for key in _NOT_LOCAL:
        if key in file.top:
            file.top.note(key, f"{key} has no place in a cluster of provider type local; its hosts are all alike")
    file.top.check_keys((*TOP, *_NOT_LOCAL))
    file.top.text("cluster_name")
    file.top.section("auth").check_keys(_AUTH)
    for key in (key for key in TOP if key.endswith("_commands")):
        file.top.texts(key)


def _check_provider(file: ClusterFile) -> None:
    provider = file.provider
    if "provider" in file.top and not isinstance(file.top.value("provider"), Section):
        return  # that is said already
    if provider.value("type") != "local":
        provider.note("type", f"provider.type is {provider.value('type')!r}; raypod reads clusters of type local")
        return
    provider.check_keys(_PROVIDER)
    if not provider.text("head_ip"):
        provider.note("head_ip", "provider.head_ip is missing")
    addresses = file.addresses
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        times = addresses.count(address)
        provider.note("worker_ips", f"host {address} is listed {times} times (head_ip and worker_ips)")
    workers = len(provider.texts("worker_ips"))
    for key in ("min_workers", "max_workers"):
        number = file.top.count(key, least=0)
        if number is not None and number != workers:
            file.top.note(key, f"{key} = {number}, and worker_ips has {workers}; `ray up` would not start all of them")
    if "max_workers" in file.top and "min_workers" not in file.top:
        file.top.note("max_workers", f"max_workers without min_workers; add min_workers: {workers}")


def _check_ours(file: ClusterFile) -> None:
    ours = file.raypod
    ours.check_keys(_OURS)
    ipus, per_host = ours.count("ipus_per_host"), ours.count("instances_per_host") or 1
    ours.count("cpus_per_host")
    if ipus is not None and ipus % per_host:
        ours.note("instances_per_host", f"{ipus} IPUs of a host cannot be divided equally between {per_host} instances")
    network = ours.text("data_network")
    if network is not None and not is_network(network):
        ours.note(
            "data_network", f"metadata.raypod.data_network = {network!r} must be a network as in 10.1.0.0/16 (CIDR)"
        )
    ours.flag("numa")
    for key in ("sdk", "python", "folder"):
        ours.text(key)
    _check_vipu(ours, ipus, len(file.addresses), per_host)


def _check_vipu(ours: Section, ipus: Optional[int], hosts: int, per_host: int) -> None:
    vipu = ours.section("vipu")
    vipu.check_keys(_VIPU)
    for key in ("server", "partition", "allocation"):
        vipu.text(key)
    for key in ("port", "timeout_s"):
        vipu.count(key)
    size, gcds, domains = vipu.count("size"), vipu.count("gcds"), vipu.count("link_domains")
    if "vipu" in ours and not vipu.text("partition"):
        vipu.note("partition", "metadata.raypod.host.vipu.partition is missing: the name of the partition")
    if size is not None and size & (size - 1):
        vipu.note("size", f"a partition of {size} IPUs: the size must be a power of two")
    if size is not None and ipus is not None and size < ipus * hosts:
        vipu.note("size", f"a partition of {size} IPUs is smaller than the {hosts} hosts x {ipus} IPUs of this file")
    if gcds is not None and gcds not in (1, hosts * per_host):
        vipu.note(
            "gcds",
            f"{gcds} GCDs for {hosts} hosts x {per_host} instances: one for each ({hosts * per_host}), "
            "or 1 where the partition is reconfigurable",
        )
    if domains is not None and (hosts * per_host) % domains:
        vipu.note(
            "link_domains",
            f"{hosts * per_host} instances cannot be divided equally between {domains} IPU-Link domains",
        )


def is_network(text: str) -> bool:
    """Whether a text is an IPv4 or IPv6 network as in 10.1.0.0/16."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text


def _kind(value: Any) -> str:
    return "a mapping" if isinstance(value, Section) else type(value).__name__


def _shown(value: Any) -> str:
    return "a mapping" if isinstance(value, Section) else repr(value)
