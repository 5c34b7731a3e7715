"""`raypod doctor [--cluster FILE] [flags of raypod train]`: probe all hosts and print the findings.

`raypod doctor --program COMMAND` checks a program instead (`program_check.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Union

from raypod.errors import ClusterError
from raypod.plan import environment, flags, resolve
from raypod.plan.cluster import LOCAL, Cluster, Host, cluster_from, number_in, read_file
from raypod.plan.cluster_file import ClusterFile
from raypod.plan.config import Config
from raypod.plan.placement import Sizes, place
from raypod.pod import file_checks, probe, program_check
from raypod.pod.findings import (
    MONITOR_PORTS,
    RAY_CLUSTER,
    TROUBLE,
    WARN,
    Expected,
    Facts,
    Finding,
    counts_of,
    examine,
    table_rows,
)
from raypod.runtime import ssh
from raypod.runtime.workers import gcs, ray_admission
from raypod.runtime.workers.ray_session import named_cluster, socket_folder
from raypod.system import command_line as cli
from raypod.system.urls import is_url
from raypod.training.tasks.registry import schema_for

_PROBE_TIMEOUT_S = 60.0
_PACKAGES = ("ray", "torch", "torchvision", "raypod", "poptorch", "popdist", "horovod", "filelock")
_TOOLS = ("rsync", "gc-info", "gc-monitor", "vipu")
_COLUMN_WIDTHS = (8, 15, 4)  # level, what, host


def parser(words: Sequence[str]) -> cli.FlagParser:
    """Return the parser of a command line: that of a training, or with `--program` of a program."""
    description = "Check whether the pod is ready for a run with the same flags; with --program whether a program is."
    is_of_program = any(word.partition("=")[0] == "--program" for word in words)
    parser = cli.FlagParser(
        _check_program if is_of_program else _check_hosts,
        prog="raypod doctor",
        add_help=False,
        description=description,
    )
    if not is_of_program:
        flags.add_flags(parser, schema_for(words))
    parser.add_argument(
        "--program",
        metavar="COMMAND",
        help="run a program for one call on the emulated SDK, as in --program 'python main.py', and list what an IPU "
        "would refuse and what the emulation cannot know; only --json and --timeout apply",
    )
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help=f"timeout of the probe of each host [{_PROBE_TIMEOUT_S:g}], or of the program "
        f"[{program_check.TIMEOUT_S:g}]",
    )
    if is_of_program:
        parser.add_argument("-h", "--help", action="help", help="print this and exit")
    return parser


def _check_hosts(args: argparse.Namespace) -> int:
    """Print the findings; return 2 if one of them prevents a run, else 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # messages of hosts can contain what this locale cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    resolved = resolve.resolve(args)
    path = resolved.pod.cluster
    file = read_file(path) if path else None
    cluster = cluster_from(file, path or "") if file else LOCAL
    expected = _expected(cluster, resolved, file)
    facts = probe_hosts(cluster, probe_settings(cluster, resolved), args.timeout or _PROBE_TIMEOUT_S)
    findings = examine(expected, facts)
    if file is not None:
        checks = (file_checks.access_errors, file_checks.key_errors, file_checks.launch_errors)
        errors = [(TROUBLE, each) for check in checks for each in check(file)]
        warnings = [(WARN, each) for each in (*file_checks.launch_warnings(file), *file_checks.key_warnings(file))]
        of_file = [Finding(level, "", "cluster file", str(each)) for level, each in (*errors, *warnings)]
        unsafe = file_checks.folder_problems(cluster, file, create=False)
        findings = [*of_file, *findings, *(Finding(TROUBLE, name, "RAY_TMPDIR", why) for name, why in unsafe.items())]
    else:
        findings += _local_folder()
    findings += _named_cluster()
    if args.json:
        document = {"findings": [_fields(each) for each in findings], "hosts": facts}
        cli.show(json.dumps(document, indent=2))
    else:
        names = [host.name for host in cluster.hosts]
        cli.show(render_findings(findings, names, cli.width_of(sys.stdout)))
    return 2 if any(each.level == TROUBLE for each in findings) else 0


def _check_program(args: argparse.Namespace) -> int:
    timeout_s = program_check.TIMEOUT_S if args.timeout is None else args.timeout
    findings = program_check.check_program(args.program, timeout_s)
    if args.json:
        rows = [{"where": fields.pop("host"), **fields} for fields in map(_fields, findings)]
        cli.show(json.dumps({"findings": rows}, indent=2))
    else:
        cli.show(program_check.render(findings, cli.width_of(sys.stdout)))
    return 2 if any(each.level == TROUBLE for each in findings) else 0


def _local_folder() -> List[Finding]:
    """Return that a local Ray session has no folder that only this user can write to and that its sockets fit in."""
    try:
        socket_folder()
    except ClusterError as error:
        return [Finding(TROUBLE, LOCAL.hosts[0].name, "RAY_TMPDIR", str(error))]
    return []


def _named_cluster() -> List[Finding]:
    """Return that runs cannot join the Ray cluster that RAY_ADDRESS names."""
    hint = ""  # the first error contains it
    try:
        address = named_cluster()
        hint = "correct RAY_ADDRESS, or unset it"
        if address is not None:
            ray_admission.join_environment(address)
    except ClusterError as error:
        return [Finding(TROUBLE, "", "RAY_ADDRESS", str(error), hint)]
    return []


def probe_hosts(cluster: Cluster, settings: Dict[str, Any], timeout_s: float) -> Dict[str, Union[Facts, str]]:
    """Run the probe on all hosts in parallel; return the facts of each host, or an error message."""
    program = Path(probe.__file__).read_text()

    def probe_host(host: Host) -> Union[Facts, str]:
        python = sys.executable if cluster.is_local else "python3"
        peers = [each.address for each in cluster.hosts if each is not host and not cluster.is_local]
        words = [python, "-", json.dumps({**settings, "peers": peers})]
        result = ssh.run_on(host, cluster.ssh, words, program, timeout_s)
        arrived_s = time.time()
        if not result.succeeded:
            return result.error
        facts = result.json_object("clock_s")
        if facts is None:
            return f"the probe returned no JSON: {result.excerpt}"
        return {**facts, "skew_s": facts["clock_s"] - arrived_s}

    return ssh.map_hosts(cluster.hosts, probe_host)


def probe_settings(cluster: Cluster, resolved: Config) -> Dict[str, Any]:
    """Return the settings of the probe: which packages, tools, folders and partition it reports."""
    run_dir = resolved.run.run_dir or str(Path("runs").absolute())
    data_dir = resolved.data.data_dir or ""
    return {
        "python": sys.executable if cluster.is_local else cluster.python,
        "cwd": str(Path.cwd()) if cluster.is_local else None,
        "sdk": cluster.sdk,
        "packages": [*_PACKAGES, *([resolved.decoder] if resolved.decoder else [])],
        "tools": list(_TOOLS),
        "partition": dataclasses.asdict(cluster.vipu) if cluster.vipu else None,
        "environment": _sdk_environment(cluster),
        "folders": {
            "run folder": run_dir,
            "cache": resolved.pod.executable_cache_path,
            "object store": "/dev/shm",
            "data set": None if is_url(data_dir) else resolved.data.data_dir,
        },
        "token": file_checks.HOST_TOKEN_PATH,
    }


def _sdk_environment(cluster: Cluster) -> Dict[str, str]:
    """Return the variables by which the SDK's tools find the partition: those of the first instance."""
    if cluster.vipu is None or not cluster.hosts[0].ipus:
        return {}
    placement = place(cluster, Sizes(cluster.num_instances, cluster.num_instances, ipus_per_replica=1))
    return environment.vipu_environment(cluster.vipu, 0, placement)


def _expected(cluster: Cluster, resolved: Config, file: Optional[ClusterFile]) -> Expected:
    """Return the requirements of a run."""
    commands = file.commands("head_start_ray_commands") if file else ""
    workers = [number_in(commands, rf"--{end}-worker-port[= ](\d+)") for end in ("min", "max")]
    ports = [int(port) for name, port in re.findall(r"--([\w-]*port)[= ](\d+)", commands) if "worker-port" not in name]
    return Expected(
        cluster=cluster,
        file=resolved.pod.cluster or Expected.file,
        python_setting=file_checks.python_setting(file) if file else Expected.python_setting,
        ports=tuple(port for port in ports if port not in (0, *MONITOR_PORTS)),
        worker_ports=(workers[0] or 0, workers[1] or 0),
        metrics_port=number_in(commands, r"--metrics-export-port[= ](\d+)") or 0,
        data_dir=resolved.data.data_dir,
        requires_ipus={"ipu": True, "emulated": False}.get(resolved.run.device),
        may_use_horovod=resolved.run.collectives != "gloo",
        decoder=resolved.decoder,
        gcs=gcs.check(cluster.gcs_address) if cluster.gcs_address else None,
    )


def render_findings(findings: Sequence[Finding], hosts: Sequence[str], width: Optional[int] = None) -> str:
    """Return the findings as a table with a summary line; equal findings of several hosts are one row.

    Args:
        findings: the findings of all hosts.
        hosts: the names of the hosts.
        width: of a terminal in columns: longer findings are folded. None folds nothing.
    """
    rows = table_rows(findings, "host", lambda names: _host_cell(names, hosts))
    table = cli.format_table(rows, _COLUMN_WIDTHS, separator=" ", width=width)
    return "\n".join([*table, "", summary(findings, len(hosts))])


def summary(findings: Sequence[Finding], hosts: int) -> str:
    """Return one line with the verdict and the number of findings of each level."""
    start = next((f" for {each.hint}" for each in findings if each.what == RAY_CLUSTER), "")
    verdict = "not ready" if any(each.level == TROUBLE for each in findings) else f"ready{start}"
    return f"{verdict}: {cli.counted(hosts, 'host')}, {counts_of(findings)}"


def _host_cell(names: Sequence[str], hosts: Sequence[str]) -> str:
    if names == [""]:
        return "pod"
    if len(hosts) > 1 and len(names) == len(hosts):
        return f"all {len(hosts)}"
    return cli.shortened(names)


def _fields(finding: Finding) -> Dict[str, Any]:
    """Return a finding for JSON. `way_out` is the former name of `hint`."""
    return {**dataclasses.asdict(finding), "way_out": finding.hint}
