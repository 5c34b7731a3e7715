"""Check the folder of Ray's files, RAY_TMPDIR of the start commands, on the hosts of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Dict

from raypod.plan.cluster import Cluster, Host
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import file_checks
from raypod.runtime import ssh
from raypod.system import private

_TIMEOUT_S = 30.0
_PROBLEM = 1  # exit code of the program, and of no failure of ssh or of Python


def problems(cluster: Cluster, file: ClusterFile, create: bool) -> Dict[str, str]:
    """Return why Ray must not use the folder of a host, by the host's name; create the folders that are missing.

    Hosts without a problem or without an answer are left out.
    """
    program, words = Path(private.__file__).read_text(), "exec python3 -" + ("" if create else " --check")

    def check(host: Host) -> str:
        folder = file_checks.ray_folder(file, "head" if host is cluster.hosts[0] else "worker")
        if folder is None:
            return ""
        # A shell expands it, as in the start commands.
        done = ssh.run_on(host, cluster.ssh, ["bash", "-c", f"{words} {folder}"], program, _TIMEOUT_S)
        return done.error if done.exit_code == _PROBLEM else ""

    return {name: problem for name, problem in ssh.map_hosts(cluster.hosts, check).items() if problem}
