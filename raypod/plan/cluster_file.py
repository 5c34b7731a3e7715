"""Parse a cluster YAML file: all mistakes are collected in one pass, with their lines.

The file is that of `ray up` (provider type `local`). raypod's own settings are below its free-form `metadata` key, as
`metadata.raypod`. `cluster.py` builds a Cluster from the result.

The sections of a cluster file: mappings with the lines of their keys, which record wrong values as mistakes.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import yaml

from raypod.plan.unique_keys import DuplicateKey, UniqueKeyLoader, duplicate_keys
from raypod.system.command_line import counted, suggestion


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake or a warning, and its line (1-based)."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class _Entry(NamedTuple):
    value: Any
    line: int
    item_lines: Tuple[int, ...] = ()  # of a list


class Section:
    """A mapping of the file with the lines of its keys. A wrong value is recorded as a mistake and reads as None."""

    def __init__(self, name: str, line: int, entries: Dict[str, _Entry], mistakes: List[Mistake]) -> None:
        self.name, self.line, self._entries, self._mistakes = name, line, entries, mistakes

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def add_mistake(self, key: str, text: str, item: Optional[int] = None) -> None:
        """Record a mistake at the line of a key, or of an item of its list, or of the section if the key is missing."""
        self._mistakes.append(Mistake(self.line_of(key, item), text))

    def line_of(self, key: str, item: Optional[int] = None) -> int:
        """Return the line of a key, or of an item of its list, or of the section if the key is missing."""
        entry = self._entries.get(key, _Entry(None, self.line))
        return entry.item_lines[item] if item is not None and item < len(entry.item_lines) else entry.line

    def value(self, key: str) -> Any:
        """Return the parsed YAML value of a key; None if the key is missing."""
        return self._entries.get(key, _Entry(None, self.line)).value

    def names(self) -> List[str]:
        """Return the keys in the order of the file."""
        return list(self._entries)

    def check_keys(self, known: Iterable[str]) -> None:
        """Record every unknown key, with the nearest known one."""
        known = list(known)
        for key in self._entries:
            if key not in known:
                self.add_mistake(key, f"unknown key {self.full(key)}{suggestion(key, known)}")

    def section(self, key: str) -> Section:
        """Return the mapping of a key; an empty one if the value is missing or not a mapping."""
        value = self.value(key)
        if isinstance(value, Section):
            return value
        if value is not None:
            self.add_mistake(key, f"{self.full(key)} must be a mapping, not {kind_of(value)}")
        return Section(self.full(key), self.line_of(key), {}, self._mistakes)

    def text(self, key: str) -> Optional[str]:
        """Return a string; numbers are converted, because YAML parses some addresses as numbers."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != "":
            return str(value)
        self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be a string")
        return None

    def texts(self, key: str) -> Tuple[str, ...]:
        """Return a list of strings; a single string is a list of one."""
        value = self.value(key)
        entries = [value] if isinstance(value, str) else value
        if entries is None:
            return ()
        if not isinstance(entries, list):
            self.add_mistake(key, f"{self.full(key)} must be a list of strings")
            return ()
        for number, each in enumerate(entries):
            if not isinstance(each, (str, int, float)) or isinstance(each, bool) or each == "":
                self.add_mistake(key, f"{self.full(key)} has the entry {each!r}, which must be a string", number)
        return tuple(map(str, entries))

    def integer(self, key: str, least: int = 1, most: Optional[int] = None) -> Optional[int]:
        """Return an integer of at least `least` and at most `most`."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be an integer of at least {least}")
            return None
        if most is not None and value > most:
            self.add_mistake(key, f"{self.full(key)} = {value} must be at most {most}")
            return None
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean; False if the key is missing."""
        value = self.value(key)
        if not isinstance(value, (bool, type(None))):
            self.add_mistake(key, f"{self.full(key)} = {_format_value(value)} must be true or false")
        return value is True

    def full(self, key: str) -> str:
        """Return the name of a key with those of the sections around it."""
        return f"{self.name}.{key}" if self.name else key


def read_section(name: str, node: yaml.MappingNode, loader: yaml.SafeLoader, mistakes: List[Mistake]) -> Section:
    """Return a section and its subsections; `file_mounts` and `docker` stay plain values.

    Args:
        name: the full name of the section; "" for the whole file.
        node: its mapping.
        loader: the loader that has composed the node.
        mistakes: the list to which this section and its subsections add.
    """
    prefix = f"{name}." if name else ""
    mistakes += (Mistake(each.line, f"{prefix}{each}") for each in duplicate_keys(node))
    loader.flatten_mapping(node)
    entries: Dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key, line = str(loader.construct_document(key_node)), key_node.start_mark.line + 1
        full = f"{prefix}{key}"
        value: Any = None
        if isinstance(value_node, yaml.MappingNode) and full not in ("file_mounts", "docker"):
            value = read_section(full, value_node, loader, mistakes)
        else:
            try:
                value = loader.construct_document(value_node)
            except DuplicateKey as error:
                mistakes.append(Mistake(error.line, f"{full}: {error}"))
        items = value_node.value if isinstance(value_node, yaml.SequenceNode) else ()
        entries[key] = _Entry(value, line, tuple(item.start_mark.line + 1 for item in items))
    return Section(name, node.start_mark.line + 1, entries, mistakes)


def kind_of(value: Any) -> str:
    """Return how a message names the type of a value."""
    return "a mapping" if isinstance(value, Section) else type(value).__name__


def _format_value(value: Any) -> str:
    return "a mapping" if isinstance(value, Section) else repr(value)


# The top-level keys of `ray up` (ray-schema.json; min_workers: autoscaler/_private/local/config.py).
TOP_LEVEL_KEYS = (
    *("cluster_name", "min_workers", "max_workers", "upscaling_speed", "idle_timeout_minutes", "provider", "auth"),
    *("docker", "file_mounts", "cluster_synced_files", "file_mounts_sync_continuously", "rsync_exclude"),
    *("rsync_filter", "metadata", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands", "no_restart"),
)
_NOT_LOCAL = ("available_node_types", "head_node_type", "head_node", "worker_nodes")
_PROVIDER = ("type", "head_ip", "worker_ips", "external_head_ip", "cache_stopped_nodes", "disable_node_updaters")
_AUTH = ("ssh_user", "ssh_private_key", "ssh_public_key", "ssh_proxy_command", "ssh_proxy_use_node_id")
_RAYPOD = (
    *("ipus_per_host", "instances_per_host", "cpus_per_host", "data_network", "numa", "sdk", "python", "folder"),
    "vipu",
)
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\Z")  # of a host name
_USER = re.compile(r"[^-\s\0][^\s\0]*\Z")  # with a dash at its beginning it would be an option of ssh
_VIPU = ("server", "port", "timeout_s", "partition", "allocation", "size", "gcds", "link_domains")


@dataclasses.dataclass(frozen=True)
class ClusterFile:
    """A parsed file: its sections and its mistakes."""

    top: Section
    mistakes: List[Mistake]

    @property
    def provider(self) -> Section:
        """The section `provider`: the hosts."""
        return self.top.section("provider")

    @property
    def raypod(self) -> Section:
        return self.top.section("metadata").section("raypod")

    @property
    def addresses(self) -> Tuple[str, ...]:
        """The addresses of the hosts, the head first."""
        head = self.provider.text("head_ip")
        return (*((head,) if head else ()), *self.provider.texts("worker_ips"))

    def commands(self, key: str) -> str:
        """Return the start commands below a key as one string."""
        value = self.top.value(key)
        return "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")


def parse(text: str) -> ClusterFile:
    """Parse and check the text of a file.

    Raises:
        yaml.YAMLError: the text is not YAML.
        TypeError: the text is not a mapping, or one of another program; the message is what was found.
    """
    mistakes: List[Mistake] = []
    loader = UniqueKeyLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise TypeError(kind_of(loader.construct_document(node)) if node is not None else "nothing")
        top = read_section("", node, loader, mistakes)
    finally:
        loader.dispose()
    if "apiVersion" in top and "kind" in top:
        raise TypeError(f"those of a Kubernetes file (kind {top.value('kind')}): kubectl applies it")
    file = ClusterFile(top, mistakes)
    _check_top(file)
    _check_provider(file)
    _check_raypod(file)
    unique = {(mistake.line, mistake.text): mistake for mistake in mistakes}
    mistakes[:] = sorted(unique.values(), key=lambda mistake: mistake.line)
    return file


def _check_top(file: ClusterFile) -> None:
    for key in _NOT_LOCAL:
        if key in file.top:
            file.top.add_mistake(key, f"{key} is not a key of provider type local, whose hosts are all alike")
    if "raypod" in file.top.names():
        above = "" if "metadata" in file.top.names() else "write metadata: above it and "
        file.top.add_mistake("raypod", f"raypod belongs under metadata: {above}indent it")
    file.top.check_keys((*TOP_LEVEL_KEYS, *_NOT_LOCAL, "raypod"))
    file.top.text("cluster_name")
    auth = file.top.section("auth")
    auth.check_keys(_AUTH)
    user = auth.text("ssh_user")
    if user is not None and not is_user(user):
        auth.add_mistake("ssh_user", f"auth.ssh_user: {user!r} is not the name of a user")
    for key in (key for key in TOP_LEVEL_KEYS if key.endswith("_commands")):
        file.top.texts(key)


def _check_provider(file: ClusterFile) -> None:
    provider = file.provider
    if "provider" in file.top and not isinstance(file.top.value("provider"), Section):
        return  # already recorded
    if provider.value("type") != "local":
        provider.add_mistake("type", f"provider.type is {provider.value('type')!r}; raypod supports only type local")
        return
    provider.check_keys(_PROVIDER)
    if not provider.text("head_ip"):
        provider.add_mistake("head_ip", "provider.head_ip is missing")
    for key in ("head_ip", "external_head_ip"):
        _check_hosts(provider, key, [provider.text(key)])
    _check_workers(file)


def _check_workers(file: ClusterFile) -> None:
    provider, given = file.provider, file.provider.value("worker_ips")
    if isinstance(given, str):
        entries = ", ".join(re.findall(r"[^\s,]+", given))
        provider.add_mistake("worker_ips", f"provider.worker_ips must be a list, as in [{entries}]")
        return
    workers = provider.texts("worker_ips")
    if given is not None and not isinstance(given, list):
        return  # already recorded
    _check_hosts(provider, "worker_ips", workers)
    addresses = file.addresses
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        times = addresses.count(address)
        provider.add_mistake("worker_ips", f"host {address} is listed {times} times (head_ip and worker_ips)")
    entries = f"{len(workers)} {'entry' if len(workers) == 1 else 'entries'}"
    for key in ("min_workers", "max_workers"):
        number = file.top.integer(key, least=0)
        if number is not None and number != len(workers):
            text = f"{key} = {number}, but worker_ips has {entries}; `ray up` would not start all of them"
            file.top.add_mistake(key, text)
    if "max_workers" in file.top and "min_workers" not in file.top:
        file.top.add_mistake("max_workers", f"max_workers requires min_workers; add min_workers: {len(workers)}")


def _check_hosts(section: Section, key: str, texts: Iterable[Optional[str]]) -> None:
    """Record each of the strings of a key that is neither a host name nor an IP address."""
    for number, text in enumerate(texts):
        if text is not None and not is_host(text):
            section.add_mistake(key, f"{section.full(key)}: {text!r} is neither a host name nor an IP address", number)


def _check_raypod(file: ClusterFile) -> None:
    metadata = file.top.section("metadata")
    for key in difflib.get_close_matches("raypod", metadata.names(), cutoff=0.8):  # other keys are those of the user
        if key != "raypod":
            metadata.add_mistake(key, f"unknown key metadata.{key}; did you mean raypod?")
    for key in set(metadata.names()) & set(_RAYPOD) - {"python", "folder"}:  # general names, as another tool can use
        metadata.add_mistake(key, f"metadata.{key} has no effect; did you mean metadata.raypod.{key}?")
    settings = file.raypod
    settings.check_keys(_RAYPOD)
    ipus, per_host = settings.integer("ipus_per_host"), settings.integer("instances_per_host") or 1
    settings.integer("cpus_per_host")
    if ipus is not None and ipus % per_host:
        settings.add_mistake(
            "instances_per_host",
            f"{counted(ipus, 'IPU')} per host cannot be divided equally between {per_host} instances",
        )
    network = settings.text("data_network")
    if network is not None and not is_network(network):
        settings.add_mistake(
            "data_network",
            f"metadata.raypod.data_network = {network!r} must be a network in CIDR notation, as in 10.1.0.0/16",
        )
    settings.flag("numa")
    for key in ("sdk", "python", "folder"):
        settings.text(key)
    _check_vipu(settings, ipus, len(file.addresses), per_host)


def _check_vipu(settings: Section, ipus: Optional[int], hosts: int, per_host: int) -> None:
    vipu = settings.section("vipu")
    vipu.check_keys(_VIPU)
    for key in ("partition", "allocation"):
        vipu.text(key)
    _check_hosts(vipu, "server", [vipu.text("server")])
    vipu.integer("port", most=65535)
    vipu.integer("timeout_s")
    size, gcds, domains = vipu.integer("size"), vipu.integer("gcds"), vipu.integer("link_domains")
    if "vipu" in settings and not vipu.text("partition"):
        vipu.add_mistake("partition", "metadata.raypod.vipu.partition is missing (the name of the partition)")
    if size is not None and size & (size - 1):
        vipu.add_mistake("size", f"the size of the partition, {size} IPUs, must be a power of two")
    if size is not None and ipus is not None and size < ipus * hosts:
        vipu.add_mistake(
            "size",
            f"a partition of {counted(size, 'IPU')} is smaller than the {ipus * hosts} IPUs of the hosts of this file",
        )
    if gcds is not None and gcds not in (1, hosts * per_host):
        vipu.add_mistake(
            "gcds",
            f"{gcds} GCDs for {hosts} hosts x {per_host} instances: must be one for each ({hosts * per_host}), "
            "or 1 for a reconfigurable partition",
        )
    if domains is not None and (hosts * per_host) % domains:
        vipu.add_mistake(
            "link_domains",
            f"{hosts * per_host} instances cannot be divided equally between {domains} IPU-Link domains",
        )


def is_user(text: str) -> bool:
    """Return whether a string can be the name of a user before the @ of an ssh destination."""
    return _USER.match(text) is not None


def is_host(text: str) -> bool:
    """Return whether a string is a host name or the IPv4 or IPv6 address of a host."""
    if ":" not in text and not re.search(r"(^|\.)\d+\.?$", text):  # a name whose last label is a number is an address
        return len(text) <= 253 and all(_LABEL.match(label) for label in text.rstrip(".").split("."))
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)


def is_network(text: str) -> bool:
    """Return whether a string is an IPv4 or IPv6 network in CIDR notation."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return "/" in text
