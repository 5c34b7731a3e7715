"""`python -m raypod doctor [--cluster FILE] [flags of raypod.train]`: ask all hosts at once, examine, tell."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from raypod import cli
from raypod.fleet import gcs
from raypod.plan import environment, resolve
from raypod.plan.cluster import LOCAL, Cluster, Host, cluster_from, read_file
from raypod.plan.config import Config
from raypod.plan.placement import place
from raypod.pod import file_checks, probe, ssh
from raypod.pod.finding import OK, TROUBLE, WARN, Expected, Facts, Finding
from raypod.pod.findings import examine
from raypod.pod.listeners import MONITOR_PORTS

_PACKAGES = ("ray", "torch", "torchvision", "raypod", "poptorch", "popdist", "horovod", "scikit-learn")
_TOOLS = ("rsync", "gc-info", "gc-monitor", "vipu")


def doctor(argv: Sequence[str]) -> int:
    """Print what was found; 2 if something is in the way of a run."""
    parser = cli.FlagParser(prog="raypod doctor", description="Is the pod ready for a run?")
    resolve.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="findings and facts as JSON")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="bound of the questions to a host [60]"
    )
    args = resolve.parse_arguments(parser, argv)
    resolved = resolve.resolve(args)
    path = resolved.pod.cluster
    file = read_file(path) if path else None
    cluster = cluster_from(file, path or "") if file else LOCAL
    expected = _expected(cluster, resolved, file.commands("head_start_ray_commands") if file else "")
    facts = ask(cluster, settings_for(cluster, resolved), args.timeout)
    findings = examine(expected, facts)
    if file is not None:
        mistakes = [
            (TROUBLE, each) for each in (*file_checks.mistakes_of_access(file), *file_checks.mistakes_for_launch(file))
        ]
        advice = [(WARN, each) for each in file_checks.advice_for_launch(file)]
        findings = [*(Finding(level, "", "cluster file", str(each)) for level, each in (*mistakes, *advice)), *findings]
    if args.json:
        told = {"findings": [dataclasses.asdict(each) for each in findings], "hosts": facts}
        print(json.dumps(told, indent=2))  # noqa: T201 - the command line's own output
    else:
        print(render_findings(findings, [host.name for host in cluster.hosts]))  # noqa: T201
    return 2 if any(each.level == TROUBLE for each in findings) else 0


def ask(cluster: Cluster, settings: Dict[str, Any], timeout_s: float) -> Dict[str, Union[Facts, str]]:
    """The facts of every host, asked at the same time; an error in words for one that does not tell."""
    program = Path(probe.__file__).read_text()

    def one(host: Host) -> Union[Facts, str]:
        python = sys.executable if cluster is LOCAL else "python3"
        words = [python, "-", json.dumps({**settings, "peers": _peers(cluster, host)})]
        done = ssh.run_on(host, cluster.ssh, words, program, timeout_s)
        came_s = time.time()
        if not done.went_well:
            return done.complaint
        try:
            facts: Dict[str, Any] = json.loads(done.output[done.output.index("{") :])
        except ValueError:
            return f"answered something else than facts: {' '.join(done.output.split())[:80]!r}"
        return {**facts, "skew_s": facts["clock_s"] - came_s}

    return ssh.on_all(cluster.hosts, one)


def settings_for(cluster: Cluster, resolved: Config) -> Dict[str, Any]:
    """What the probe is asked to look at."""
    run_dir = resolved.run.run_dir or str(Path("runs").absolute())
    return {
        "python": sys.executable if cluster is LOCAL else cluster.python,
        "cwd": str(Path.cwd()) if cluster is LOCAL else None,
        "sdk": cluster.sdk,
        "packages": list(_PACKAGES),
        "tools": list(_TOOLS),
        "partition": dataclasses.asdict(cluster.vipu) if cluster.vipu else None,
        "environment": _sdk_environment(cluster),
        "folders": {
            "run folder": run_dir,
            "cache": resolved.pod.executable_cache_path,
            "object store": "/dev/shm",
            "data set": resolved.data.data_dir,
        },
        "token": file_checks.TOKEN_ON_HOSTS,
    }


def _sdk_environment(cluster: Cluster) -> Dict[str, str]:
    """What leads the SDK's tools to the partition, as the first instance will be led."""
    if cluster.vipu is None or not cluster.hosts[0].ipus:
        return {}
    placement = place(cluster, cluster.instances, cluster.instances)
    controller = (cluster.vipu.server, cluster.vipu.port, cluster.vipu.timeout_s)
    return environment.vipu_environment(cluster.vipu.partition, 0, controller, placement, cluster.vipu.link_domains)


def _expected(cluster: Cluster, resolved: Config, commands: str) -> Expected:
    workers = [_number(rf"--{end}-worker-port[= ](\d+)", commands) for end in ("min", "max")]
    ports = [int(port) for name, port in re.findall(r"--([\w-]*port)[= ](\d+)", commands) if "worker-port" not in name]
    return Expected(
        cluster=cluster,
        ports=tuple(port for port in ports if port not in (0, *MONITOR_PORTS)),
        worker_ports=(workers[0] or 0, workers[1] or 0),
        metrics_port=_number(r"--metrics-export-port[= ](\d+)", commands) or 0,
        data_dir=resolved.data.data_dir,
        wants_ipus={"ipu": True, "emulated": False}.get(resolved.run.device),
        gcs=gcs.check(cluster.gcs_address) if cluster.gcs_address else None,
    )


def _number(pattern: str, text: str) -> Optional[int]:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else None


def _peers(cluster: Cluster, host: Host) -> List[str]:
    return [each.address for each in cluster.hosts if each is not host and cluster is not LOCAL]


# --- from doctor.table: Findings for the eye: one line each; what is the same on many hosts is said once.

_WHAT_WIDTH = 15


def render_findings(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    """The table, and a last line that counts."""
    together: Dict[Tuple[str, str, str, str], List[str]] = {}
    for finding in findings:
        together.setdefault((finding.level, finding.what, finding.text, finding.way_out), []).append(finding.host)
    rows = [(key, _told(names, hosts)) for key, names in together.items()]
    width = max([4, *(len(told) for _, told in rows)])
    lines = [f"{'':<8} {'what':<{_WHAT_WIDTH}} {'host':<{width}} finding"]
    for (level, what, text, way_out), told in rows:
        shown = text if not way_out else f"{text}; {way_out}"
        lines.append(f"{level:<8} {what:<{_WHAT_WIDTH}} {told:<{width}} {shown}")
    return "\n".join([*lines, "", summary(findings, len(hosts))])


def summary(findings: Sequence[Finding], hosts: int) -> str:
    """How many of each level."""
    counts = {level: sum(finding.level == level for finding in findings) for level in (OK, WARN, TROUBLE)}
    verdict = "not ready" if counts[TROUBLE] else "ready"
    told = f"{hosts} host{'s' if hosts != 1 else ''}"
    return f"{verdict}: {told}, {counts[OK]} ok, {counts[WARN]} to know, {counts[TROUBLE]} in the way of a run"


def _told(names: Sequence[str], hosts: Sequence[str]) -> str:
    if names == [""]:
        return "pod"
    if len(hosts) > 1 and len(names) == len(hosts):
        return f"all {len(hosts)}"
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
