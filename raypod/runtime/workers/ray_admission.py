"""Token authentication of a Ray cluster: create the token, and check that this process can join a cluster.

`raypod up` creates the token and `ray up` copies it to the hosts. Ray supports tokens since 2.52
(`RAY_AUTH_MODE=token`). A process with the token can run commands on every host, so only its owner can read the file.
"""

from __future__ import annotations

import os
import secrets
import stat
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Dict, Optional

from raypod.errors import ClusterError
from raypod.runtime.workers import gcs
from raypod.system.interfaces import interface_addresses

SINCE = (2, 52)
NO_TOKEN = (
    "Ray {} does not support token authentication (added in 2.52). Any process that can connect to its ports can run "
    "commands"
)
NO_TOKEN_REMEDY = (
    "restrict the ports to the cluster's hosts with a firewall, or enable TLS: see docs/explanation/security.md"
)


def ray_version() -> str:
    """Return the version of the installed Ray; "" if it is not installed."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""


def has_tokens(ray: str) -> bool:
    """Return whether a version of Ray has token authentication."""
    numbers = [int(part) if part.isdigit() else 0 for part in ray.split(".")[:2]]
    return tuple(numbers) >= SINCE


def ensure_token(path: Path) -> Optional[str]:
    """Create the token, or make an existing one unreadable for other users; return a message if that was necessary.

    Raises:
        ClusterError: the file cannot be created or its mode cannot be changed.
    """
    try:
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                path.chmod(0o600)
                return f"{path} was readable by other users (mode {mode:04o}); now it is 0600"
            return None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise ClusterError(f"cannot create the cluster's token {path}: {error.strerror}") from None
    return f"created the cluster's token: {path} (mode 0600)"


def join_environment(address: str) -> Dict[str, str]:
    """Return the environment with which Ray joins the cluster whose GCS is at `address`.

    Raises:
        ClusterError: the cluster does not respond, is another user's, rejects the token, has another version of Ray, or
            does not include this host.
    """
    answer = gcs.check(address, only_own=True)  # a run would execute its code on the cluster of another user
    mode = {"RAY_AUTH_MODE": "disabled"}
    if answer.state == gcs.REFUSED:
        token = gcs.own_token()
        if token is None:
            raise ClusterError(
                f"the Ray cluster at {address} requires a token, and this host has none: {gcs.token_path()} does not "
                "exist (nor RAY_AUTH_TOKEN); copy the file from the cluster's head, or run this there"
            )
        answer, mode = gcs.check(address, token), {"RAY_AUTH_MODE": "token"}
        if answer.state == gcs.REFUSED:
            where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else gcs.token_path()
            raise ClusterError(
                f"the Ray cluster at {address} rejects the token of {where}: it is another cluster's; copy the file "
                "from the cluster's head, or run this there"
            )
    if answer.state == gcs.FOREIGN:
        raise ClusterError(f"the Ray cluster at {address} is not joined and gets no token: {answer.detail}")
    if answer.state == gcs.SILENT:
        raise ClusterError(f"no Ray cluster responds at {address}: {answer.detail}")
    own = ray_version()
    if answer.detail and own and answer.detail != own:
        raise ClusterError(
            f"the Ray cluster at {address} runs Ray {answer.detail}, and this host has {own}; both must be equal"
        )
    _check_is_member(address)
    return mode


def _check_is_member(address: str) -> None:
    """Raise ClusterError if this machine is not a host of the cluster: `ray.init` would wait for minutes."""
    try:
        alive = gcs.alive_addresses(address, gcs.own_token())
    except OSError as error:
        raise ClusterError(str(error)) from None
    own = set(interface_addresses().values())
    if alive and not any(each in own or each.startswith("127.") or ":" in each for each in alive):
        raise ClusterError(
            f"this machine ({', '.join(sorted(own))}) is not a host of the Ray cluster at {address}; run this on one "
            f"of {', '.join(sorted(alive))}"
        )
