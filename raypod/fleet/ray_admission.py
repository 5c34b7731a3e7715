"""The secret of a cluster: made once by the operator, brought to the hosts by `ray up`, and asked for before a join.

Ray has it since 2.52 (`RAY_AUTH_MODE=token`). Who has it may run commands on every host, so its file is for its owner
alone.
"""

from __future__ import annotations

import os
import secrets
import stat
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Dict, Optional

from raypod.errors import ClusterError
from raypod.fleet import gcs
from raypod.host.interfaces import interface_addresses

SINCE = (2, 52)
NO_TOKEN = (
    "Ray {} has no token authentication (2.52 and later have): whoever reaches its ports can run commands; let a "
    "firewall admit the hosts alone, and see RAY_USE_TLS in README, What is exposed"
)


def ray_version() -> str:
    """The version of the Ray that is installed here; "" if none is."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return ""


def has_tokens(ray: str) -> bool:
    """Whether a version of Ray has token authentication."""
    numbers = [int(part) if part.isdigit() else 0 for part in ray.split(".")[:2]]
    return tuple(numbers) >= SINCE


def ensure_token(path: Path) -> Optional[str]:
    """See that there is a token, which nobody else can read; what was done, if anything.

    Raises:
        ClusterError: the file cannot be made or closed.
    """
    try:
        if path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                path.chmod(0o600)
                return f"{path} was readable for others (mode {mode:04o}); now it is 0600"
            return None
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise ClusterError(f"cannot make the cluster's token {path}: {error.strerror}") from None
    return f"made the cluster's token: {path} (mode 0600)"


def admission(address: str) -> Dict[str, str]:
    """The variables with which Ray joins the cluster whose GCS is at `address`; found out in a moment.

    Raises:
        ClusterError: the cluster does not answer, wants a token that is not here, or has another Ray.
    """
    answer = gcs.check(address)
    mode = {"RAY_AUTH_MODE": "disabled"}
    if answer.state == gcs.REFUSED:
        token = gcs.own_token()
        if token is None:
            raise ClusterError(
                f"the Ray cluster at {address} is closed by a token, and here is none: {gcs.token_path()} is not there "
                "(nor RAY_AUTH_TOKEN); copy the file from the cluster's head, or run this there"
            )
        answer, mode = gcs.check(address, token), {"RAY_AUTH_MODE": "token"}
        if answer.state == gcs.REFUSED:
            where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else gcs.token_path()
            raise ClusterError(
                f"the Ray cluster at {address} refuses the token of {where}: it is another cluster's; copy the file "
                "from the cluster's head, or run this there"
            )
    if answer.state == gcs.SILENT:
        raise ClusterError(f"no Ray cluster answers at {address}: {answer.told}")
    own = ray_version()
    if answer.told and own and answer.told != own:
        raise ClusterError(
            f"the Ray cluster at {address} runs Ray {answer.told}, and here is {own}; both must be equal"
        )
    _check_is_member(address)
    return mode


def _check_is_member(address: str) -> None:
    """A process of a machine that is no host of the cluster would wait in `ray.init` for minutes."""
    try:
        alive = gcs.alive_addresses(address, gcs.own_token())
    except OSError as error:
        raise ClusterError(str(error)) from None
    own = set(interface_addresses().values())
    if alive and not any(each in own or each.startswith("127.") or ":" in each for each in alive):
        raise ClusterError(
            f"this machine ({', '.join(sorted(own))}) is no host of the Ray cluster at {address}; run this on one of "
            f"{', '.join(sorted(alive))}"
        )
