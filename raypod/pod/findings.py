"""Check the facts of all hosts against the requirements of a run. Pure functions.

Facts are the output of `probe.py`; for a host that could not be probed, an error message stands in their place.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from raypod.plan.cluster import Cluster
from raypod.runtime.workers import gcs, ray_admission
from raypod.system import interfaces, vipu
from raypod.system.command_line import counted
from raypod.system.interfaces import is_address, is_in, is_loopback

OK, WARN, TROUBLE = "ok", "warn", "trouble"
RAY_CLUSTER = "Ray cluster"  # the subject of the finding that Ray does not run; `hint` starts it

Facts = Mapping[str, Any]
MONITOR_PORTS = (44217, 44227)  # metrics of the autoscaler and the dashboard; Ray has no flag for them
DASHBOARD_PORT = 8265
_RAY_CLIENT_PORT = 10001
_ANY = ("0.0.0.0", "::")
_GIB = 1 << 30
_CLOCK_WARN_S, _CLOCK_TROUBLE_S = 2.0, 30.0
_RUN_FOLDER_TROUBLE_BYTES, _RUN_FOLDER_WARN_BYTES = _GIB // 4, 2 * _GIB
_MIN_SHM_FREE_BYTES, _MIN_SHM_BYTES = _GIB // 4, _GIB
_MIN_OPEN_FILES = 8192
_EQUAL_MEMORY = 0.9  # share that a host has of the memory of another one of the same kind
_MUST_MATCH = ("ray", "torch", "torchvision", "poptorch", "horovod")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding: a line of the doctor's table. `host` is "" for a finding about the whole pod."""

    level: str
    host: str
    what: str
    text: str
    hint: str = ""  # what to do


@dataclasses.dataclass(frozen=True)
class Expected:
    """The requirements of a run on the hosts, from the cluster file and the flags."""

    cluster: Cluster
    file: str = "FILE"  # the cluster file as the command names it
    python_setting: str = "metadata.raypod.python"  # where the file names the interpreter
    ports: Tuple[int, ...] = ()  # fixed by the start commands, without the ports of workers
    worker_ports: Tuple[int, int] = (0, 0)
    metrics_port: int = 0  # the one of `ports` that Prometheus scrapes
    data_dir: Optional[str] = None
    requires_ipus: Optional[bool] = None  # None: only on hosts that have IPUs
    may_use_horovod: bool = True  # an installed Horovod is used
    decoder: Optional[str] = None  # the package that decodes the images of the data set
    gcs: Optional[gcs.Answer] = None  # the answer to a request without a token; None if not requested


def table_rows(findings: Sequence[Finding], where: str, cell: Callable[[List[str]], str]) -> List[Tuple[str, ...]]:
    """Return the rows of a table, the header first; findings that differ only in their hosts are one row.

    `where` is the name of the column of the hosts, and `cell` returns its text.
    """
    grouped: Dict[Tuple[str, str, str], List[str]] = {}
    for each in findings:
        text = f"{each.text}; {each.hint}" if each.hint else each.text
        grouped.setdefault((each.level, each.what, text), []).append(each.host)
    rows = ((level, what, cell(hosts), text) for (level, what, text), hosts in grouped.items())
    return [("", "what", where, "finding"), *rows]


def counts_of(findings: Sequence[Finding]) -> str:
    """Return the numbers of findings, as in "3 ok, 0 warn, 1 trouble"."""
    return ", ".join(f"{sum(each.level == level for each in findings)} {level}" for level in (OK, WARN, TROUBLE))


def examine(expected: Expected, hosts: Mapping[str, Union[Facts, str]]) -> List[Finding]:
    """Return all findings: subjects in the order of a start, and hosts in order within each subject."""
    found = [
        Finding(TROUBLE, name, "reachable", facts, "ssh must work without a password: ssh -o BatchMode=yes HOST")
        for name, facts in hosts.items()
        if isinstance(facts, str)
    ]
    known = {name: facts for name, facts in hosts.items() if not isinstance(facts, str)}
    found += [Finding(OK, name, "reachable", f"as {facts['user']}") for name, facts in known.items()]
    checks: List[Callable[[Expected, str, Facts], Iterator[Finding]]]
    checks = [_python, _ipus, _network, _horovod, _ports, _exposure, _folders, _data, _limits, _token, _autoscaler]
    for check in checks:
        for name, facts in known.items():
            found += check(expected, name, facts)
        if check is _python:
            found += [*_same_versions(expected, known), *_same_hardware(expected.cluster, known)]
        elif check is _horovod:
            found += _clocks(known)
    return [*found, *_same_token(known), *_gcs_access(expected), *_ray_cluster(expected, known)]


def _python(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    python, install = facts["python"], "`raypod up` installs it by setup_commands of the cluster file"
    if "error" in python:
        name = "" if expected.cluster.python in python["error"] else f"{expected.cluster.python}: "
        hint = f"{install}; if it has run, correct {expected.python_setting}"
        yield Finding(TROUBLE, host, "python", f"{name}{python['error']}", hint)
        return
    packages = python["packages"]
    for name in ("ray", "torch", "raypod"):
        if packages.get(name) is None:
            yield Finding(TROUBLE, host, name, f"not installed in {python['path']}", install)
    have = ", ".join(f"{name} {packages[name]}" for name in ("ray", "torch", "raypod") if packages.get(name))
    yield Finding(OK, host, "python", f"{python['version']}; {have}")
    if not expected.cluster.is_local and not facts["tools"].get("rsync"):
        yield Finding(TROUBLE, host, "rsync", "not installed", "`ray up` requires it: apt-get install rsync")


def _same_versions(expected: Expected, known: Mapping[str, Facts]) -> Iterator[Finding]:
    pythons = {name: facts["python"] for name, facts in known.items() if "error" not in facts["python"]}
    subjects = {"Python": {name: python["version"] for name, python in pythons.items()}}
    for package in _MUST_MATCH:
        if any(python["packages"].get(package) for python in pythons.values()):
            subjects[package] = {name: str(python["packages"].get(package)) for name, python in pythons.items()}
    if expected.decoder is not None:  # of which a run compares the major version
        versions = {name: str(python["packages"].get(expected.decoder)) for name, python in pythons.items()}
        subjects[expected.decoder] = {name: version.partition(".")[0] for name, version in versions.items()}
    digests = {name: python["raypod_sha256"] for name, python in pythons.items()}
    subjects["raypod's files"] = {name: digest[:12] for name, digest in digests.items() if digest}
    for subject, versions in subjects.items():
        if len(set(versions.values())) > 1:
            text = f"{subject} differs: {_grouped(versions)}"
            yield Finding(TROUBLE, "", "same everywhere", text, "install the same version on all hosts")
    if len(pythons) > 1 and all(len(set(versions.values())) <= 1 for versions in subjects.values()):
        yield Finding(OK, "", "same everywhere", ", ".join(name for name in subjects if subjects[name]))


def _same_hardware(cluster: Cluster, known: Mapping[str, Facts]) -> Iterator[Finding]:
    """Warn of hosts that have other CPUs or memory than others, or fewer CPUs than the cluster file says."""
    cpus = {name: int(facts["cpus"]) for name, facts in known.items()}
    stated = next((host.cpus for host in cluster.hosts), None)
    for name, number in cpus.items():
        if stated is not None and number < stated and not cluster.is_local:
            text = f"{number}, but the cluster file has cpus_per_host: {stated}"
            yield Finding(WARN, name, "CPUs", text, "correct metadata.raypod.cpus_per_host")
    hint = "all instances wait for the slowest host in every update"
    if len(set(cpus.values())) > 1:
        text = f"differ: {_grouped({name: str(number) for name, number in cpus.items()})}"
        yield Finding(WARN, "", "CPUs", text, hint)
    sizes = {name: float(facts["memory_bytes"]) for name, facts in known.items()}
    if sizes and min(sizes.values()) < _EQUAL_MEMORY * max(sizes.values()):
        text = f"differs: {_grouped({name: f'{size / _GIB:.0f} GiB' for name, size in sizes.items()})}"
        yield Finding(WARN, "", "memory", text, "the instances of every host need the same: the smallest must suffice")


def _ipus(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    wanted = next((each.ipus for each in expected.cluster.hosts if each.name == host), None)
    poptorch = facts["python"].get("packages", {}).get("poptorch")
    severity = TROUBLE if expected.requires_ipus else WARN
    if expected.requires_ipus is False or (expected.requires_ipus is None and wanted is None and not poptorch):
        yield Finding(OK, host, "IPUs", "none required: the emulated SDK is used")
        return
    if not poptorch:
        text = "poptorch is not installed; --device auto uses the emulated SDK"
        yield Finding(severity, host, "SDK", text, "install the Poplar SDK, see metadata.raypod.sdk")
    else:
        yield Finding(OK, host, "SDK", f"poptorch {poptorch}")
    ipus = facts["ipus"]
    if ipus is None:
        yield Finding(severity, host, "IPUs", "neither gc-info nor gc-monitor is on the PATH", "enable the Poplar SDK")
    elif ipus["error"] or ipus["count"] is None:
        text = ipus["error"] or "gc-monitor works, but only gc-info counts IPUs"
        yield Finding(
            severity if ipus["error"] else WARN, host, "IPUs", text, "check the partition: vipu get partition"
        )
    elif wanted is not None and ipus["count"] < wanted:
        text = f"{ipus['count']} visible, but the cluster file requires {wanted}"
        yield Finding(severity, host, "IPUs", text, "enlarge the partition")
    else:
        yield Finding(OK, host, "IPUs", f"{ipus['count']} visible")
    yield from _partition(expected.cluster, host, facts, severity)


def _partition(cluster: Cluster, host: str, facts: Facts, severity: str) -> Iterator[Finding]:
    result = facts["partition"]
    if cluster.vipu is None or result is None:
        return
    name = cluster.vipu.partition
    if result["exit_code"]:
        why = result["error"] or f"exit code {result['exit_code']}"
        yield Finding(severity, host, "partition", f"{name}: {why}", "vipu list partitions")
        return
    found, state = vipu.parse_partition(name, result["output"]), vipu.parse_state(result["output"])
    size = counted(found.size, "IPU") if found.size else "size unknown"
    if cluster.vipu.size and found.size and found.size != cluster.vipu.size:
        text = f"{name} has {size}, but the cluster file requires {cluster.vipu.size}"
        yield Finding(severity, host, "partition", text, "correct the cluster file")
    elif state and state.lower() not in ("active", "ready", "running", "ok"):
        yield Finding(severity, host, "partition", f"{name} is {state}", f"vipu reset partition {name}")
    else:
        yield Finding(OK, host, "partition", f"{name}: {size}, {state or 'state unknown'}")


def _network(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    cluster = expected.cluster
    if cluster.is_local:
        return
    for peer, why in facts["unreachable"].items():
        yield Finding(TROUBLE, host, "network", f"cannot reach {peer}: {why}", "check the route and the firewall")
    addresses: Dict[str, Tuple[str, int]] = {name: tuple(value) for name, value in facts["interfaces"].items()}
    host_address = next((each.address for each in cluster.hosts if each.name == host), host)
    network = cluster.data_network or host_address
    found = {name: address for name, (address, _) in addresses.items() if is_in(address, network)}
    listed = ", ".join(f"{name} {address}" for name, (address, _) in addresses.items())
    if not found and cluster.data_network:
        text = f"no interface in data_network {cluster.data_network}; interfaces: {listed}"
        yield Finding(TROUBLE, host, "data network", text, "correct metadata.raypod.data_network")
    elif not found and is_address(host_address):
        text = f"no interface has the address {host_address} of the cluster file; interfaces: {listed}"
        hint = "use the host's own address in the cluster file: Ray identifies a host by it"
        yield Finding(WARN, host, "data network", text, hint)
    else:
        name = next(iter(found), "?")
        text = f"{name} {found.get(name, host_address)}: Gloo and Horovod use only this interface"
        yield Finding(OK, host, "data network", text)
    head = cluster.hosts[0].address
    source = facts["towards"].get(head)
    if is_address(host_address) and host_address != head and source not in (None, host_address):
        text = f"its address towards the head is {source}, but the cluster file has {host_address}; Ray uses {source}"
        yield Finding(TROUBLE, host, "network", text, f"list {source} in worker_ips")


def _horovod(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    release = facts["python"].get("packages", {}).get("horovod")
    if len(expected.cluster.hosts) < 2 or not release or not expected.may_use_horovod:
        return
    own = facts["own_name"]
    problem = interfaces.horovod_problem(release, facts["hostname"], own["address"], own["error"])
    if problem is None:
        yield Finding(OK, host, "Horovod", release)
    else:
        yield Finding(TROUBLE, host, "Horovod", problem, "or use --collectives gloo")


def _clocks(known: Mapping[str, Facts]) -> Iterator[Finding]:
    """Compare clocks by `skew_s`: a host's clock minus this machine's when its facts arrived."""
    skews = {name: float(facts["skew_s"]) for name, facts in known.items() if "skew_s" in facts}
    if len(skews) < 2:
        return
    spread, last = max(skews.values()) - min(skews.values()), max(skews, key=lambda name: skews[name])
    level = OK if spread < _CLOCK_WARN_S else WARN if spread < _CLOCK_TROUBLE_S else TROUBLE
    text = f"differ by up to {spread:.1f} s" + (f", {last} is ahead" if level != OK else "")
    yield Finding(level, "", "clocks", text, "" if level == OK else "run an NTP client on all hosts")


def _folders(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    for name, folder in facts["folders"].items():
        free = f"{folder['free_bytes'] / _GIB:.1f} GiB free in {folder['path']}"
        if name == "data set":
            continue
        if name == "object store":
            is_enough = folder["total_bytes"] >= _MIN_SHM_BYTES and folder["free_bytes"] >= _MIN_SHM_FREE_BYTES
            level = OK if is_enough else WARN
            hint = "enlarge /dev/shm (containers: --shm-size): Ray's object store and loader workers use it"
        else:
            is_enough = folder["free_bytes"] >= _RUN_FOLDER_WARN_BYTES
            level = OK if is_enough else WARN if folder["free_bytes"] >= _RUN_FOLDER_TROUBLE_BYTES else TROUBLE
            hint = "free disk space, or choose another folder"
        if not folder["is_writable"]:
            level, free = TROUBLE, f"{folder['path']} is not writable by {facts['user']}"
        yield Finding(level, host, name, free, "" if level == OK else hint)


def _data(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    folder = facts["folders"].get("data set")
    if folder is None:
        return
    if not folder["exists"] or folder["is_empty"]:
        text = f"{folder['path']} {'is empty' if folder['exists'] else 'does not exist'}"
        yield Finding(TROUBLE, host, "data set", text, "mount it, or copy it to every host")
    else:
        yield Finding(OK, host, "data set", str(folder["path"]))


def _limits(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    if 0 < facts["open_files"] < _MIN_OPEN_FILES:
        text = f"at most {facts['open_files']} open files"
        yield Finding(WARN, host, "limits", text, "raise the hard limit nofile in /etc/security/limits.conf")
    if expected.cluster.numa and facts["numa_nodes"] < 2:
        yield Finding(OK, host, "NUMA", "one node: its cores are divided between the instances")


def _token(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    ray = facts["python"].get("packages", {}).get("ray")
    if expected.cluster.is_local:
        return
    if ray and not ray_admission.has_tokens(ray):
        yield Finding(WARN, host, "token", ray_admission.NO_TOKEN.format(ray), ray_admission.NO_TOKEN_REMEDY)
        return
    token = facts["token"]
    if expected.cluster.auth_mode != "token":
        text = f"RAY_AUTH_MODE is {expected.cluster.auth_mode or 'not set'} in the start commands: the cluster is open"
        hint = "export RAY_AUTH_MODE=token in both start commands, as in cluster/pod64.yaml"
        yield Finding(TROUBLE, host, "token", text, hint)
    elif "error" in token:
        text = f"{token['path']}: {token['error']}"
        yield Finding(TROUBLE, host, "token", text, "`raypod up` creates it and copies it to the hosts")
    elif token["mode"][-2:] != "00" or not token["is_own"]:
        text = f"{token['path']} has mode {token['mode']}" + ("" if token["is_own"] else " and another owner")
        yield Finding(TROUBLE, host, "token", f"{text}: other users can read it", f"chmod 600 {token['path']}")
    else:
        yield Finding(OK, host, "token", f"{token['path']}, mode {token['mode']}")


def _same_token(known: Mapping[str, Facts]) -> Iterator[Finding]:
    digests = {name: facts["token"]["sha256"][:12] for name, facts in known.items() if "sha256" in facts["token"]}
    if len(set(digests.values())) > 1:
        text = f"differs between hosts (sha256 {_grouped(digests)})"
        yield Finding(TROUBLE, "", "token", text, "run `raypod up` again")


def _gcs_access(expected: Expected) -> Iterator[Finding]:
    """Check how the GCS answered a request without a token."""
    answer, address = expected.gcs, expected.cluster.gcs_address
    if answer is None:
        return
    if answer.state == gcs.REFUSED:
        yield Finding(OK, "", "closed", f"the GCS at {address} refuses requests without the token")
    elif answer.state == gcs.SILENT:
        text = f"no answer at {address} without a token ({answer.detail}): Ray does not run, or a firewall blocks it"
        yield Finding(OK, "", "closed", text)
    elif expected.cluster.auth_mode == "token" and ray_admission.has_tokens(answer.detail or "0"):
        hint = "restart it: raypod up"
        yield Finding(TROUBLE, "", "closed", f"the GCS at {address} answers requests without a token", hint)
    else:
        text = f"the GCS at {address} answers every request"
        yield Finding(WARN, "", "closed", text, "restrict access to the hosts by a firewall")


def _autoscaler(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    """Report that the autoscaler of the head can block itself: see `autoscaler_hosts`."""
    packages = facts["python"].get("packages", {})
    ray, filelock = (packages.get(name) or "" for name in ("ray", "filelock"))
    is_head = not expected.cluster.is_local and host == expected.cluster.hosts[0].name
    if is_head and ray.startswith("2.10.") and not re.match(r"(3\.(\d|10)\.|$)", filelock):
        text = f"that of Ray {ray} can block itself with filelock {filelock} while it starts hosts"
        yield Finding(WARN, host, "autoscaler", text, "pip install 'filelock<3.11' there, then raypod up")


def _ray_cluster(expected: Expected, known: Mapping[str, Facts]) -> Iterator[Finding]:
    """Report that Ray does not run on the head: its GCS is silent, and nothing there listens in its place.

    Without a raylet that can belong to this cluster it was not started; others end soon after their GCS.
    """
    head, cluster = known.get(expected.cluster.hosts[0].name), expected.cluster
    if head is None or expected.gcs is None or expected.gcs.state != gcs.SILENT:
        return
    is_left = bool({cluster.name, None} & set(head["clusters"]))
    ports = {each["port"] for each in head["listening"]}
    if not is_left or (ports and cluster.gcs_port not in ports):
        text = (
            "the GCS has ended, and the other processes of Ray follow"
            if is_left
            else "Ray does not run on the head yet"
        )
        yield Finding(OK, cluster.hosts[0].name, RAY_CLUSTER, text, f"raypod up {expected.file}")


def _grouped(values: Mapping[str, str]) -> str:
    """Return each distinct value with the hosts that have it, as in "2.0.1: a, b; 2.1.0: c"."""
    hosts: Dict[str, List[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in hosts.items())


def _ports(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    """Check that the ports of the start commands are free, or used by this cluster."""
    if not expected.ports:
        return
    cluster, taken, ours = expected.cluster, {}, 0
    for each in facts["listening"]:
        is_workers = expected.worker_ports[0] <= each["port"] <= expected.worker_ports[1]
        if each["port"] in expected.ports or is_workers:
            is_driver = is_workers and each["is_ray"] and each["cluster"] is None
            if each["cluster"] == cluster.name or is_driver:
                ours += 1
            else:
                taken[each["port"]] = each
    for port, each in sorted(taken.items()):
        owner = f"{each['program']}, pid {each['pid']}" if each["pid"] else "a process of another user"
        of_cluster = f" of the cluster {each['cluster']}" if each["cluster"] else ""
        if each["is_orphan"]:
            text = f"{port} is in use by {owner}, which is left of a Ray that has ended"
            yield Finding(WARN, host, "ports", text, "it ends by itself within a minute")
            continue
        hint = "stop it, or change the ports in the start commands"
        yield Finding(TROUBLE, host, "ports", f"{port} is in use by {owner}{of_cluster}", hint)
    others = sum(1 for mark in facts["clusters"] if mark != cluster.name)
    if others:
        text = f"{counted(others, 'other Ray cluster')} on this host"
        yield Finding(WARN, host, "ports", text, "`raypod up` and `down` do not affect other clusters")
    if not taken:
        yield Finding(OK, host, "ports", "in use by this cluster" if ours else f"{len(expected.ports)} free")


def _exposure(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    """Check the addresses on which this cluster listens.

    Ray binds most of its ports to all interfaces and protects them by the token.
    """
    name, (first, last) = expected.cluster.name, expected.worker_ports
    ours = [each for each in facts["listening"] if each["cluster"] == name and not is_loopback(each["address"])]
    if not ours or expected.cluster.is_local:
        return
    for each in ours:
        if each["port"] == DASHBOARD_PORT:
            text = f"listens on {each['address']}:{DASHBOARD_PORT}"
            hint = "start Ray with --dashboard-host=127.0.0.1, and use `ray dashboard`"
            yield Finding(TROUBLE, host, "dashboard", text, hint)
    known = {*expected.ports, *range(first, last + 1), *MONITOR_PORTS, _RAY_CLIENT_PORT}
    rest = [each for each in ours if each["port"] not in known]
    open_to_all = sorted({each["port"] for each in rest if each["address"] in _ANY})
    if open_to_all:
        numbers = ", ".join(map(str, open_to_all))
        text = f"{numbers}: ports of Ray on all interfaces that no start command fixes"
        yield Finding(WARN, host, "exposed", text, "restrict access to the hosts by a firewall")
    network = expected.cluster.data_network or next((e.address for e in expected.cluster.hosts if e.name == host), host)
    outside = {f"{e['address']}:{e['port']}" for e in rest if e["address"] not in _ANY and not _is_of(e, network)}
    if outside:
        text = f"{', '.join(sorted(outside))}: of an instance, outside the data network {network}"
        yield Finding(WARN, host, "exposed", text, "correct metadata.raypod.data_network and restart the run")
    pages = sorted({each["port"] for each in ours if each["port"] in (*MONITOR_PORTS, expected.metrics_port)})
    if pages:
        text = f"{', '.join(map(str, pages))}: metrics, readable without the token"
        hint = "restrict access to the hosts and the metrics collector by a firewall"
        yield Finding(WARN, host, "exposed", text, hint)
    inside = f", {len(rest)} of instances in {network}" if rest and not open_to_all and not outside else ""
    of_ray = len({each["port"] for each in ours if each["port"] in known})
    yield Finding(OK, host, "exposed", f"{of_ray} ports of Ray{inside} (see docs/explanation/security.md)")


def _is_of(listener: Mapping[str, Any], network: str) -> bool:
    address = str(listener["address"]).replace("::ffff:", "")
    return is_address(address) and is_in(address, network)
