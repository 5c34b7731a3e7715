"""What Ray's launcher would do with a cluster file other than its author thinks: mistakes that end a start, and advice.

`python -m raypod up` refuses the mistakes and tells the advice; `doctor` tells both. The facts are those of Ray 2.10 to
2.60 with provider type `local`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import List, Optional

from raypod.fleet import gcs
from raypod.plan.cluster_file import ClusterFile, Mistake
from raypod.pod.stop_cluster import MARK

TOKEN_ON_HOSTS = "~/.ray/auth_token"  # where Ray looks for it
KEY_ON_A_HEAD = "~/ray_bootstrap_key.pem"  # where `ray up` puts the operator's ssh key


def mistakes_for_launch(file: ClusterFile) -> List[Mistake]:
    """Why `ray up` would fail, or the cluster not be what the file says."""
    top, found = file.top, []
    if "cluster_name" not in top:
        found.append(Mistake(1, "cluster_name is missing"))
    if "worker_ips" not in file.provider:
        found.append(Mistake(file.top.line_of("provider"), "provider.worker_ips is missing; without workers it is []"))
    if "ssh_user" not in top.section("auth"):
        found.append(Mistake(top.line_of("auth"), "auth.ssh_user is missing"))
    for mount, source in (top.value("file_mounts") or {}).items():
        path = Path(str(source)).expanduser()
        if not path.exists() and path != token_source(file):  # that is made before it is brought to the hosts
            found.append(
                Mistake(
                    top.line_of("file_mounts"), f"file_mounts: {source} (for {mount}) is not there, from {Path.cwd()}"
                )
            )
    for kind in ("head", "worker"):
        found += _mistakes_of(kind, file)
    return found


def mistakes_of_access(file: ClusterFile) -> List[Mistake]:
    """Why the hosts cannot be reached from here, as far as this machine can tell."""
    auth = file.top.section("auth")
    key = auth.text("ssh_private_key")
    if key is None or Path(key).expanduser().is_file() or Path(KEY_ON_A_HEAD).expanduser().is_file():
        return []
    return [Mistake(auth.line_of("ssh_private_key"), f"auth.ssh_private_key: {key} is not there")]


def advice_for_launch(file: ClusterFile) -> List[Mistake]:
    """What works, and is not what one wants of a pod."""
    found = []
    for kind in ("head", "worker"):
        key = f"{kind}_start_ray_commands"
        commands, line = file.commands(key), file.top.line_of(key)
        for pattern, text in _ADVICE[kind]:
            if commands and not re.search(pattern, commands):
                found.append(Mistake(line, f"{key}: {text}"))
        if re.search(r"\bray stop\b", commands):
            found.append(Mistake(line, f"{key}: `ray stop` ends the Ray of other clusters on the host, too"))
        if re.search(r"--dashboard-host[= ](0\.0\.0\.0|\*|::)", commands):
            found.append(Mistake(line, f"{key}: the dashboard is open to the network; --dashboard-host=127.0.0.1"))
        if _auth_mode(commands) == "disabled":
            found.append(Mistake(line, f"{key}: RAY_AUTH_MODE=disabled: whoever reaches a port can run commands"))
    return found


def token_source(file: ClusterFile) -> Path:
    """Where the token lies that is brought to the hosts; this user's own where the file brings none."""
    source = (file.top.value("file_mounts") or {}).get(TOKEN_ON_HOSTS)
    return Path(str(source)).expanduser() if source else Path(gcs.token_path())


def tls_variables(file: ClusterFile) -> List[str]:
    """The words NAME=VALUE by which the head is started with TLS; none where it is not."""
    commands = file.commands("head_start_ray_commands")
    return [f"{name}={value}" for name, value in re.findall(r"\b(RAY_(?:USE_)?TLS\w*)=([^\s;]+)", commands)]


def is_marked(file: ClusterFile) -> bool:
    """Whether the processes of the cluster can be told from those of others."""
    name = file.top.text("cluster_name")
    keys = ("head_start_ray_commands", "worker_start_ray_commands")
    return all(re.search(rf"\b{MARK}={re.escape(str(name))}(\s|;|$)", file.commands(key)) for key in keys)


def _mistakes_of(kind: str, file: ClusterFile) -> List[Mistake]:
    key = f"{kind}_start_ray_commands"
    commands, line = file.commands(key), file.top.line_of(key)
    if not commands:
        if kind == "worker" and not file.provider.texts("worker_ips"):
            return []
        return [Mistake(1, f"{key} is missing: Ray's own start neither closes the cluster nor knows IPUs")]
    told = []
    if kind == "head" and "--autoscaling-config" not in commands:
        told.append("--autoscaling-config=~/ray_bootstrap_config.yaml is missing: no worker would start")
    if _auth_mode(commands) is None:
        told.append("RAY_AUTH_MODE=token is missing: whether the cluster is closed would depend on old files of a host")
    head, given = file.provider.text("head_ip"), re.search(r"--node-ip-address[= ]([\w.:-]+)", commands)
    if kind == "head" and given and given.group(1) != head:
        told.append(f"--node-ip-address={given.group(1)}, and provider.head_ip is {head}")
    ipus, resources = file.ours.count("ipus_per_host"), re.search(r'"IPU"\s*:\s*(\d+)', commands)
    if ipus and (resources is None or int(resources.group(1)) != ipus):
        said = f"says {resources.group(1)} IPUs" if resources else "says nothing of IPUs"
        told.append(f"{said}, and metadata.raypod.ipus_per_host is {ipus}: --resources='{{\"IPU\":{ipus}}}'")
    return [Mistake(line, f"{key}: {text}") for text in told]


def _auth_mode(commands: str) -> Optional[str]:
    found = re.search(r"\bRAY_AUTH_MODE=[\"']?(\w+)", commands)
    return found.group(1) if found else None


_BOTH = [
    (r"\bunset\b[^;&]*\bOMP_NUM_THREADS|\bOMP_NUM_THREADS=", "`ray up` sets OMP_NUM_THREADS=1; unset OMP_NUM_THREADS"),
    (rf"\b{MARK}=", f"export {MARK}=<cluster_name>, and `raypod down` ends the processes of this cluster alone"),
    (r"--min-worker-port", "the ports of workers are not fixed (--min-worker-port, --max-worker-port)"),
]
_ADVICE = {
    "head": [
        *_BOTH,
        (r"\bRAY_enable_autoscaler_v2=0", "autoscaler v2 starts one worker too few; export RAY_enable_autoscaler_v2=0"),
        (r"--node-ip-address", "without --node-ip-address a head may come up as 127.0.0.1"),
        (r"\bRAY_TMPDIR=|--temp-dir", "/tmp/ray belongs to the first user of a host; export RAY_TMPDIR=/tmp/ray-$USER"),
    ],
    "worker": [*_BOTH],
}
