"""What the facts of the hosts mean for a run: findings, each with what to do. Pure functions of facts and of the plan.

Facts are what `probe.py` prints, by host; a host that could not be asked has an error in words in their place.
"""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Mapping, Tuple, Union

from raypod.fleet import gcs, ray_admission
from raypod.host import vipu
from raypod.host.interfaces import is_address, is_in
from raypod.plan.cluster import LOCAL, Cluster
from raypod.pod.finding import OK, TROUBLE, WARN, Expected, Facts, Finding
from raypod.pod.listeners import exposure, ports

_GIB = 1 << 30
_CLOCK_WARN_S, _CLOCK_TROUBLE_S = 2.0, 30.0
_LEAST_RUN_FOLDER, _WISHED_RUN_FOLDER = _GIB // 4, 2 * _GIB
_LEAST_SHM, _WISHED_SHM = _GIB // 4, _GIB
_WISHED_OPEN_FILES = 8192
_MUST_MATCH = ("ray", "torch", "torchvision", "poptorch", "horovod")


def examine(expected: Expected, hosts: Mapping[str, Union[Facts, str]]) -> List[Finding]:
    """All findings, host by host within each subject, the subjects in the order of a start."""
    found = [
        Finding(TROUBLE, name, "reachable", facts, "see that ssh works without a password: ssh -o BatchMode=yes HOST")
        for name, facts in hosts.items()
        if isinstance(facts, str)
    ]
    known = {name: facts for name, facts in hosts.items() if not isinstance(facts, str)}
    found += [Finding(OK, name, "reachable", f"as {facts['user']}") for name, facts in known.items()]
    checks: List[Callable[[Expected, str, Facts], Iterator[Finding]]]
    checks = [_python, _ipus, _network, ports, exposure, _folders, _data, _limits, _token]
    for check in checks:
        for name, facts in known.items():
            found += check(expected, name, facts)
        if check is _python:
            found += _same_versions(known)
        elif check is _network:
            found += _clocks(known)
    return [*found, *_same_token(known), *_door(expected)]


def _python(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    python, install = facts["python"], "`ray up` installs it: setup_commands of the cluster file"
    if "error" in python:
        yield Finding(TROUBLE, host, "python", f"{expected.cluster.python}: {python['error']}", install)
        return
    packages = python["packages"]
    for name in ("ray", "torch", "raypod"):
        if packages.get(name) is None:
            yield Finding(TROUBLE, host, name, f"{python['path']} does not have it", install)
    have = ", ".join(f"{name} {packages[name]}" for name in ("ray", "torch", "raypod") if packages.get(name))
    yield Finding(OK, host, "python", f"{python['version']}; {have}")
    if expected.cluster is not LOCAL and not facts["tools"].get("rsync"):
        yield Finding(TROUBLE, host, "rsync", "is not installed", "`ray up` needs it: apt-get install rsync")


def _same_versions(known: Mapping[str, Facts]) -> Iterator[Finding]:
    pythons = {name: facts["python"] for name, facts in known.items() if "error" not in facts["python"]}
    subjects = {"Python": {name: python["version"] for name, python in pythons.items()}}
    for package in _MUST_MATCH:
        if any(python["packages"].get(package) for python in pythons.values()):
            subjects[package] = {name: str(python["packages"].get(package)) for name, python in pythons.items()}
    digests = {name: python["raypod_sha256"] for name, python in pythons.items()}
    subjects["raypod's files"] = {name: digest[:12] for name, digest in digests.items() if digest}
    for subject, versions in subjects.items():
        if len(set(versions.values())) > 1:
            told = "; ".join(f"{version}: {', '.join(_having(versions, version))}" for version in _distinct(versions))
            yield Finding(
                TROUBLE, "", "same everywhere", f"{subject} differs: {told}", "install one version on all hosts"
            )
    if len(pythons) > 1 and all(len(set(versions.values())) <= 1 for versions in subjects.values()):
        yield Finding(OK, "", "same everywhere", ", ".join(name for name in subjects if subjects[name]))


def _ipus(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    wanted = next((each.ipus for each in expected.cluster.hosts if each.name == host), None)
    poptorch = facts["python"].get("packages", {}).get("poptorch")
    must = TROUBLE if expected.wants_ipus else WARN
    if expected.wants_ipus is False or (expected.wants_ipus is None and wanted is None and not poptorch):
        yield Finding(OK, host, "IPUs", "none are asked for: the emulated SDK")
        return
    if not poptorch:
        text, way_out = "no poptorch is installed; --device auto computes on the emulated SDK", "metadata.raypod.sdk"
        yield Finding(must, host, "SDK", text, f"install the Poplar SDK, see {way_out}")
    else:
        yield Finding(OK, host, "SDK", f"poptorch {poptorch}")
    ipus = facts["ipus"]
    if ipus is None:
        yield Finding(must, host, "IPUs", "neither gc-info nor gc-monitor is on the PATH", "enable the Poplar SDK")
    elif ipus["error"] or ipus["count"] is None:
        said = ipus["error"] or "gc-monitor works; only gc-info counts IPUs"
        yield Finding(must if ipus["error"] else WARN, host, "IPUs", said, "check the partition: vipu get partition")
    elif wanted is not None and ipus["count"] < wanted:
        yield Finding(
            must, host, "IPUs", f"{ipus['count']} are visible, and the file says {wanted}", "enlarge the partition"
        )
    else:
        yield Finding(OK, host, "IPUs", f"{ipus['count']} are visible")
    yield from _partition(expected.cluster, host, facts, must)


def _partition(cluster: Cluster, host: str, facts: Facts, must: str) -> Iterator[Finding]:
    said = facts["partition"]
    if cluster.vipu is None or said is None:
        return
    name = cluster.vipu.partition
    if said["exit_code"]:
        why = said["error"] or f"exit code {said['exit_code']}"
        yield Finding(must, host, "partition", f"{name}: {why}", "vipu list partitions")
        return
    found, state = vipu.parse_partition(name, said["output"]), vipu.state_of(said["output"])
    size = f"{found.size} IPUs" if found.size else "size unknown"
    if cluster.vipu.size and found.size and found.size != cluster.vipu.size:
        yield Finding(
            must, host, "partition", f"{name} has {size}, and the file says {cluster.vipu.size}", "correct the file"
        )
    elif state and state.lower() not in ("active", "ready", "running", "ok"):
        yield Finding(must, host, "partition", f"{name} is {state}", f"vipu reset partition {name}")
    else:
        yield Finding(OK, host, "partition", f"{name}: {size}, {state or 'it does not say in which state'}")


def _network(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    cluster = expected.cluster
    if cluster is LOCAL:
        return
    for peer, why in facts["unreachable"].items():
        yield Finding(TROUBLE, host, "network", f"does not reach {peer}: {why}", "check the route and the firewall")
    interfaces: Dict[str, Tuple[str, int]] = {name: tuple(value) for name, value in facts["interfaces"].items()}
    of_host = next((each.address for each in cluster.hosts if each.name == host), host)
    network = cluster.data_network or of_host
    found = {name: address for name, (address, _) in interfaces.items() if is_in(address, network)}
    listed = ", ".join(f"{name} {address}" for name, (address, _) in interfaces.items())
    if not found and cluster.data_network:
        text = f"no interface is in data_network {cluster.data_network}; there are {listed}"
        yield Finding(TROUBLE, host, "data network", text, "correct metadata.raypod.data_network")
    elif not found and is_address(of_host):
        text = f"no interface has the address {of_host} of the file; there are {listed}"
        yield Finding(WARN, host, "data network", text, "Ray knows a host by its own address: use that one in the file")
    else:
        name = next(iter(found), "?")
        yield Finding(
            OK, host, "data network", f"{name} {found.get(name, of_host)}: Gloo and Horovod get this one alone"
        )
    head = cluster.hosts[0].address
    source = facts["towards"].get(head)
    if is_address(of_host) and of_host != head and source not in (None, of_host):
        text = f"its address towards the head is {source}, and the file says {of_host}: Ray will know it as {source}"
        yield Finding(TROUBLE, host, "network", text, f"list {source} in worker_ips")


def _clocks(known: Mapping[str, Facts]) -> Iterator[Finding]:
    """`skew_s`: a host's clock minus this machine's, at the moment its facts came."""
    skews = {name: float(facts["skew_s"]) for name, facts in known.items() if "skew_s" in facts}
    if len(skews) < 2:
        return
    spread, last = max(skews.values()) - min(skews.values()), max(skews, key=lambda name: skews[name])
    level = OK if spread < _CLOCK_WARN_S else WARN if spread < _CLOCK_TROUBLE_S else TROUBLE
    text = f"apart by {spread:.1f} s at most" + (f", {last} is ahead" if level != OK else "")
    yield Finding(level, "", "clocks", text, "" if level == OK else "run an NTP client on all hosts")


def _folders(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    for name, folder in facts["folders"].items():
        free = f"{folder['free_bytes'] / _GIB:.1f} GiB free in {folder['path']}"
        if name == "data set":
            continue
        if name == "object store":
            level = OK if folder["total_bytes"] >= _WISHED_SHM and folder["free_bytes"] >= _LEAST_SHM else WARN
            way_out = "enlarge /dev/shm (containers: --shm-size); Ray's object store and loader workers live there"
        else:
            enough = folder["free_bytes"] >= _WISHED_RUN_FOLDER
            level = OK if enough else WARN if folder["free_bytes"] >= _LEAST_RUN_FOLDER else TROUBLE
            way_out = "make room, or choose another folder"
        if not folder["is_writable"]:
            level, free = TROUBLE, f"{folder['path']} cannot be written by {facts['user']}"
        yield Finding(level, host, name, free, "" if level == OK else way_out)


def _data(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    folder = facts["folders"].get("data set")
    if folder is None:
        return
    if not folder["exists"]:
        yield Finding(TROUBLE, host, "data set", f"{folder['path']} is not there", "mount it, or copy it to every host")
    elif folder["is_empty"]:
        yield Finding(TROUBLE, host, "data set", f"{folder['path']} is empty", "mount it, or copy it to every host")
    else:
        yield Finding(OK, host, "data set", str(folder["path"]))


def _limits(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    if 0 < facts["open_files"] < _WISHED_OPEN_FILES:
        text = f"at most {facts['open_files']} open files"
        yield Finding(WARN, host, "limits", text, "raise the hard limit: nofile in /etc/security/limits.conf")
    if expected.cluster.numa and facts["numa_nodes"] < 2:
        yield Finding(OK, host, "NUMA", "one node: nothing to bind")


def _token(expected: Expected, host: str, facts: Facts) -> Iterator[Finding]:
    ray = facts["python"].get("packages", {}).get("ray")
    if expected.cluster is LOCAL:
        return
    if ray and not ray_admission.has_tokens(ray):
        text, _, way_out = ray_admission.NO_TOKEN.format(ray).partition("; ")
        yield Finding(WARN, host, "token", text, way_out)
        return
    token = facts["token"]
    if expected.cluster.auth_mode != "token":
        text = f"RAY_AUTH_MODE is {expected.cluster.auth_mode or 'not set'} in the start commands: the cluster is open"
        yield Finding(TROUBLE, host, "token", text, "export RAY_AUTH_MODE=token in both, as cluster/pod64.yaml does")
    elif "error" in token:
        text = f"{token['path']}: {token['error']}"
        yield Finding(TROUBLE, host, "token", text, "`python -m raypod up` makes it and brings it to the hosts")
    elif token["mode"][-2:] != "00" or not token["is_own"]:
        text = f"{token['path']} has mode {token['mode']}" + ("" if token["is_own"] else " and another owner")
        yield Finding(TROUBLE, host, "token", f"{text}: others can read it", f"chmod 600 {token['path']}")
    else:
        yield Finding(OK, host, "token", f"{token['path']}, mode {token['mode']}")


def _same_token(known: Mapping[str, Facts]) -> Iterator[Finding]:
    digests = {name: facts["token"]["sha256"][:12] for name, facts in known.items() if "sha256" in facts["token"]}
    if len(set(digests.values())) > 1:
        told = "; ".join(f"{digest}: {', '.join(_having(digests, digest))}" for digest in _distinct(digests))
        yield Finding(TROUBLE, "", "token", f"not the same on all hosts (sha256 {told})", "`python -m raypod up` again")


def _door(expected: Expected) -> Iterator[Finding]:
    """What one without a token hears from the head."""
    answer, address = expected.gcs, expected.cluster.gcs_address
    if answer is None:
        return
    if answer.state == gcs.REFUSED:
        yield Finding(OK, "", "closed", f"the GCS at {address} answers nobody without the token")
    elif answer.state == gcs.SILENT:
        text = f"nothing at {address} for one without a token ({answer.told}): Ray is not up, or well hidden"
        yield Finding(OK, "", "closed", text)
    elif expected.cluster.auth_mode == "token" and ray_admission.has_tokens(answer.told or "0"):
        way_out = "start it again: python -m raypod up"
        yield Finding(TROUBLE, "", "closed", f"the GCS at {address} answers without a token", way_out)
    else:
        yield Finding(
            WARN, "", "closed", f"the GCS at {address} answers everybody", "let a firewall admit the hosts alone"
        )


def _distinct(values: Mapping[str, str]) -> List[str]:
    return list(dict.fromkeys(values.values()))


def _having(values: Mapping[str, str], value: str) -> List[str]:
    return [name for name, own in values.items() if own == value]
