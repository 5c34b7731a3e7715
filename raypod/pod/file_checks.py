"""Check a cluster file and Ray's folders on its hosts for problems with Ray's launcher: errors and warnings.

`raypod up` refuses errors and prints warnings; `doctor` lists both. Applies to Ray 2.10 to 2.60 with provider type
`local`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.plan.cluster import IPU_RESOURCE, Cluster, Host, auth_mode_in, number_in
from raypod.plan.cluster_file import ClusterFile, Mistake
from raypod.pod.stop_cluster import MARK
from raypod.runtime import ssh
from raypod.runtime.ssh import HEAD_KEY_PATH, has_passphrase
from raypod.runtime.workers import gcs
from raypod.system import private
from raypod.system.command_line import counted

HOST_TOKEN_PATH = "~/.ray/auth_token"  # where Ray reads the token
_START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
# A word that the shell does not expand, in quotes or without.
_LITERAL = r"""(?:'([^']+)'|"([^"$`\\]+)"|([^]\s;&|()<>{}\[*?~'"$`\\]+))(?=[\s;&|()<>]|$)"""
_SHELL_WORD = r"""(?:\$\([^)]*\)|"[^"]*"|'[^']*'|[^\s;&|()<>"'])+"""
_MARKED = rf"\b{MARK}="
_NAMED = (  # where start commands name the cluster: a pattern, and what stands before and after the name
    (_MARKED, f"{MARK}=", ""),
    (r"\bstop_cluster\.py[ \t]+", "stop_cluster.py ", ""),
    (r"\bactive_runs\.py[ \t]+", "active_runs.py ", ""),
    (r"/cluster-(?=\S+\.state\b)", "cluster-", ".state"),  # of Ray's launcher
)


def launch_errors(file: ClusterFile) -> List[Mistake]:
    """Return the problems for which `ray up` would fail or start another cluster than the file describes."""
    top, found = file.top, []
    if "cluster_name" not in top:
        found.append(Mistake(1, "cluster_name is missing"))
    if "worker_ips" not in file.provider:
        found.append(Mistake(file.top.line_of("provider"), "provider.worker_ips is missing; use [] for no workers"))
    if "ssh_user" not in top.section("auth"):
        found.append(Mistake(top.line_of("auth"), "auth.ssh_user is missing"))
    found += _mount_errors(file)
    for kind in ("head", "worker"):
        found += _command_errors(kind, file)
    return found + name_errors(file)


def name_errors(file: ClusterFile) -> List[Mistake]:
    """Return the start commands that name another cluster than the file: `up` and `down` would not find its processes.

    Names that are not literal, as in RAYPOD_CLUSTER=$NAME, are not judged, nor are others beside the right one, as in
    commands that also stop a cluster of an earlier name.
    """
    name, found = file.top.text("cluster_name"), []
    if name is None:
        return []
    for key in _START_COMMANDS:
        others: List[str] = []
        for pattern, before, after in _NAMED:
            names = list(dict.fromkeys(_literals(pattern, file.commands(key))))
            others += [] if name + after in names else [before + each for each in names]
        if others:
            differ = f"{', '.join(others)} {'differ' if others[1:] else 'differs'} from cluster_name {name!r}"
            found.append(Mistake(file.top.line_of(key), f"{key}: {differ}: use one name"))
    return found


def access_errors(file: ClusterFile) -> List[Mistake]:
    """Return the problems for which this machine cannot reach the hosts over ssh."""
    auth = file.top.section("auth")
    key = auth.text("ssh_private_key")
    if key is None or Path(key).expanduser().is_file() or Path(HEAD_KEY_PATH).expanduser().is_file():
        return []
    return [Mistake(auth.line_of("ssh_private_key"), f"auth.ssh_private_key: {key} does not exist")]


def key_errors(file: ClusterFile) -> List[Mistake]:
    """Return that the operator's key has a passphrase: the head, which starts the workers with it, cannot enter it."""
    auth = file.top.section("auth")
    key = auth.text("ssh_private_key")
    if key is None or not file.provider.texts("worker_ips") or not has_passphrase(key):
        return []
    text = (
        f"auth.ssh_private_key: {key} has a passphrase, which the head cannot enter to start the workers, also with an "
        "ssh agent here: use a key of the pod without one (ssh-keygen -t ed25519 -N '' -f ~/.ssh/pod)"
    )
    return [Mistake(auth.line_of("ssh_private_key"), text)]


def key_warnings(file: ClusterFile) -> List[Mistake]:
    """Return that the head has no key of the operator for the workers, whose Ray it starts over ssh."""
    if "ssh_private_key" in file.top.section("auth") or not file.provider.texts("worker_ips"):
        return []
    text = "auth.ssh_private_key is not set: the head logs in to the workers with its own default key, if it has one"
    return [Mistake(file.top.line_of("auth"), text)]


def launch_warnings(file: ClusterFile) -> List[Mistake]:
    """Return the problems that do not prevent a start but should be corrected."""
    found = []
    for kind in ("head", "worker"):
        key = f"{kind}_start_ray_commands"
        commands, line = file.commands(key), file.top.line_of(key)
        for pattern, text in _EXPECTED[kind]:
            if commands and not re.search(pattern, commands):
                found.append(Mistake(line, f"{key}: {text}"))
        if re.search(r"\bray stop\b", commands):
            found.append(Mistake(line, f"{key}: `ray stop` also stops other Ray clusters on the host"))
        if re.search(r"--dashboard-host[= ](0\.0\.0\.0|\*|::)", commands):
            found.append(Mistake(line, f"{key}: the dashboard is open to the network; use --dashboard-host=127.0.0.1"))
        if auth_mode_in(commands) == "disabled":
            found.append(Mistake(line, f"{key}: RAY_AUTH_MODE=disabled: anyone with access to a port can run commands"))
    return found


def _mount_errors(file: ClusterFile) -> List[Mistake]:
    """Return the missing sources of `file_mounts`; those that are relative to the working directory as one mistake."""
    mounts: Dict[str, Any] = file.top.value("file_mounts") or {}
    missing = {}
    for mount, source in mounts.items():
        path = Path(str(source)).expanduser()
        if not path.exists() and path != token_source(file):  # `raypod up` creates the token
            missing[mount] = path
    line = file.top.line_of("file_mounts")
    relative = [f"{path} (for {mount})" for mount, path in missing.items() if not path.is_absolute()]
    found = [f"{path} (for {mount}) does not exist" for mount, path in missing.items() if path.is_absolute()]
    if relative:
        folder = f"{', '.join(relative)} {'do' if relative[1:] else 'does'} not exist in {Path.cwd()}"
        found.append(f"{folder}; run this command in the folder to which these paths are relative, as raypod's source")
    return [Mistake(line, f"file_mounts: {text}") for text in found]


def token_source(file: ClusterFile) -> Path:
    """Return the path of the token that file_mounts copies to the hosts; by default this user's token."""
    source = (file.top.value("file_mounts") or {}).get(HOST_TOKEN_PATH)
    return Path(str(source)).expanduser() if source else Path(gcs.token_path())


def tls_variables(file: ClusterFile) -> List[str]:
    """Return the TLS variables (NAME=VALUE) in the start commands of the head."""
    commands = file.commands("head_start_ray_commands")
    return [f"{name}={value}" for name, value in re.findall(r"\b(RAY_(?:USE_)?TLS\w*)=([^\s;]+)", commands)]


def ray_folder(file: ClusterFile, kind: str) -> Optional[str]:
    """Return RAY_TMPDIR in the start commands of the head or of the workers, for a shell; None if it is not set."""
    found = re.search(r"\bRAY_TMPDIR=(" + _SHELL_WORD + ")", file.commands(f"{kind}_start_ray_commands"))
    return found.group(1) if found else None


def python_setting(file: ClusterFile) -> str:
    """Return where the file names the interpreter of the hosts, for messages."""
    is_given = "python" in file.raypod
    return "metadata.raypod.python " + (
        f"in line {file.raypod.line_of('python')}" if is_given else "(default: python3)"
    )


def is_marked(file: ClusterFile) -> bool:
    """Return whether the start commands set the mark by which `raypod down` identifies the cluster's processes."""
    name = file.top.text("cluster_name")
    return all(name in _literals(_MARKED, file.commands(key)) for key in _START_COMMANDS)


def _command_errors(kind: str, file: ClusterFile) -> List[Mistake]:
    key = f"{kind}_start_ray_commands"
    commands, line = file.commands(key), file.top.line_of(key)
    if not commands:
        if kind == "worker" and not file.provider.texts("worker_ips"):
            return []
        return [Mistake(1, f"{key} is missing: Ray's default commands set neither the token nor the IPU resource")]
    texts = []
    if kind == "head" and "--autoscaling-config" not in commands:
        texts.append("--autoscaling-config=~/ray_bootstrap_config.yaml is missing: no worker starts without it")
    if auth_mode_in(commands) is None:
        texts.append("RAY_AUTH_MODE=token is missing: Ray would choose the mode by old files on the host")
    if kind == "head" and "/private_ssh:" not in commands and file.provider.texts("worker_ips"):
        path = "PATH=$HOME/raypod/source/raypod/pod/private_ssh:$PATH"
        texts.append(
            f"{path} is missing in `export`: another user could take over the head's ssh sessions to the workers"
        )
    head, given = file.provider.text("head_ip"), re.search(r"--node-ip-address[= ]([\w.:-]+)", commands)
    if kind == "head" and given and given.group(1) != head:
        texts.append(f"--node-ip-address={given.group(1)} differs from provider.head_ip {head}")
    ipus, resources = file.raypod.integer("ipus_per_host"), number_in(commands, IPU_RESOURCE)
    if ipus and resources != ipus:
        number = "no IPUs" if resources is None else counted(resources, "IPU")
        texts.append(f"{number} in --resources, but metadata.raypod.ipus_per_host is {ipus}: use '{{\"IPU\":{ipus}}}'")
    return [Mistake(line, f"{key}: {text}") for text in texts]


def _literals(pattern: str, commands: str) -> List[str]:
    """Return the words that follow a pattern in shell commands, without quotes and without those that are expanded."""
    return ["".join(words) for words in re.findall(pattern + _LITERAL, commands)]


# A pattern that the start commands should match, and the warning if they do not.
_BOTH = [
    (r"\bunset\b[^;&]*\bOMP_NUM_THREADS|\bOMP_NUM_THREADS=", "`ray up` sets OMP_NUM_THREADS=1; unset it"),
    (rf"\b{MARK}=", f"export {MARK}=<cluster_name>, so that `raypod down` ends only this cluster"),
    (r"\bRAY_TMPDIR=|--temp-dir", "all users can write to /tmp/ray; export RAY_TMPDIR=/tmp/ray-$(id -un)"),
    (
        r"/(?:system|host)/private\.py ",
        "RAY_TMPDIR can be a folder of another user; check it: python3 ~/raypod/source/raypod/system/private.py "
        "$RAY_TMPDIR || exit 1",
    ),
    (
        r"/pod/with_template\.py ",
        "each worker imports torch anew; start Ray with python ~/raypod/source/raypod/pod/with_template.py ray start",
    ),
    (r"--min-worker-port", "the worker ports are not fixed; use --min-worker-port and --max-worker-port"),
]
_EXPECTED = {
    "head": [
        *_BOTH,
        (r"\bRAY_enable_autoscaler_v2=0", "autoscaler v2 starts one worker too few; export RAY_enable_autoscaler_v2=0"),
        (
            r"/pod/active_runs\.py ",
            "plain `ray up` ends active runs; begin with python3 ~/raypod/source/raypod/pod/active_runs.py NAME",
        ),
        (r"--node-ip-address", "without --node-ip-address the head may use 127.0.0.1"),
    ],
    "worker": [*_BOTH],
}


_TIMEOUT_S = 30.0
_PROBLEM = 1  # exit code of the program, and of no failure of ssh or of Python


def folder_problems(cluster: Cluster, file: ClusterFile, create: bool) -> Dict[str, str]:
    """Return why Ray must not use the folder of a host, by the host's name; create the folders that are missing.

    Hosts without a problem or without an answer are left out.
    """
    program, words = Path(private.__file__).read_text(), "exec python3 -" + ("" if create else " --check")

    def check(host: Host) -> str:
        folder = ray_folder(file, "head" if host is cluster.hosts[0] else "worker")
        if folder is None:
            return ""
        # A shell expands it, as in the start commands.
        done = ssh.run_on(host, cluster.ssh, ["bash", "-c", f"{words} {folder}"], program, _TIMEOUT_S)
        return done.error if done.exit_code == _PROBLEM else ""

    return {name: problem for name, problem in ssh.map_hosts(cluster.hosts, check).items() if problem}
