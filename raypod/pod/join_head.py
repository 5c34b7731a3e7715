"""`raypod up --no-restart` on any machine, also one on which the cluster was not started: it joins the running head.

Ray's launcher starts the head again, in spite of --no-restart, unless its state file on this machine says that the head
runs with the settings of the cluster file. And `file_mounts` replaces the head's token by that of this machine.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from pathlib import Path
from typing import Any, Optional

import yaml

from raypod.errors import ClusterError
from raypod.plan.cluster import Cluster
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import file_checks
from raypod.pod.collect_copies import Say
from raypod.runtime import ssh
from raypod.system.files import read_object, replace_file

_READ_TOKEN = """
import json, os
path = os.path.expanduser("~/.ray/auth_token")
print(json.dumps({"token": open(path).read() if os.path.exists(path) else None}))
"""


def take_token(cluster: Cluster, file: ClusterFile, say: Say) -> None:
    """Copy the token of the running head to this machine if it has none.

    Raises:
        ClusterError: this machine has another token, with which the cluster's programs could not reach it any more; or
            that of the head cannot be read.
    """
    path, head = file_checks.token_source(file), cluster.hosts[0]
    done = ssh.run_on(head, cluster.ssh, ["python3", "-"], _READ_TOKEN, ssh.SLACK_S)
    answer = done.json_object("token")
    if answer is None:
        raise ClusterError(f"cannot read the token of {head.name}: {done.error or 'no JSON in ' + done.excerpt}")
    token: Optional[str] = answer["token"]
    if token is None or not token.strip():
        return
    try:
        if path.is_file():
            if path.read_text().strip() != token.strip():
                raise ClusterError(
                    f"{path} is not the token with which {cluster.name} runs, and would replace it on {head.name}: "
                    f"copy {head.name}:~/.ray/auth_token to {path}, or let file_mounts name another file"
                )
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as own:
            own.write(token)
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot use the cluster's token {path}: {error}") from None
    say(f"copied the cluster's token from {head.name} to {path} (mode 0600)")


def note_running_head(cluster: Cluster, path: str, folder: Path) -> None:
    """Tell Ray's launcher that the head runs with the settings of the cluster file `path`.

    `folder` is that of the launcher's state file. OSError if the file cannot be written.
    """
    util: Any = importlib.import_module("ray.autoscaler._private.util")
    with contextlib.redirect_stdout(io.StringIO()):  # the launcher prints the same warnings into its log
        config = util.prepare_config(yaml.safe_load(Path(path).read_text()))
    kind = config["head_node_type"]
    settings = {**config.get("head_node", {}), **config["available_node_types"][kind].get("node_config", {})}
    tags = {
        "ray-node-type": "head",
        "ray-node-status": "up-to-date",
        "ray-node-name": f"ray-{cluster.name}-head",
        "ray-user-node-type": kind,
        "ray-launch-config": util.hash_launch_conf(settings, config["auth"]),
    }
    state = folder / f"cluster-{cluster.name}.state"
    known = read_object(state)
    known[config["provider"]["head_ip"]] = {"tags": tags, "state": "running"}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(state, json.dumps(known).encode())
