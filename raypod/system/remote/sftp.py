"""SFTP with host keys that are verified: fsspec's own file system connects to any host that answers.

Uses what `ssh` uses: ~/.ssh/config, the keys in ~/.ssh and those of an agent, and ~/.ssh/known_hosts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

_CONNECT_S, _ANSWER_S, _KEEPALIVE_S = 15.0, 120.0, 15


class VerifiedSftp(SFTPFileSystem):  # type: ignore[misc] # the base class has no types
    """A file system whose server has a key that is known."""

    def _connect(self) -> None:
        given = {name: value for name, value in self.ssh_kwargs.items() if name != "skip_instance_cache"}
        configured = _configured(self.host)
        options: Dict[str, Any] = {
            **{f"{name}timeout": _CONNECT_S for name in ("", "banner_", "auth_")},
            **{key: configured[name] for key, name in (("username", "user"),) if name in configured},
            **({"port": int(configured["port"])} if "port" in configured else {}),
            **({"key_filename": configured["identityfile"]} if "identityfile" in configured else {}),
            **given,
        }
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys()
        for path in (Path(name).expanduser() for name in configured.get("userknownhostsfile", "").split()):
            if path.is_file():
                self.client.load_system_host_keys(str(path))
        accepts_new = configured.get("stricthostkeychecking", "").lower() in ("no", "off", "accept-new")
        policy = paramiko.AutoAddPolicy() if accepts_new else paramiko.RejectPolicy()
        self.client.set_missing_host_key_policy(policy)
        self.client.connect(configured.get("hostname", self.host), **options)
        self.client.get_transport().set_keepalive(_KEEPALIVE_S)
        self.ftp = self.client.open_sftp()
        self.ftp.get_channel().settimeout(_ANSWER_S)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        file = self.ftp.open(self._strip_protocol(path), mode, bufsize=-1)
        if "r" in mode:
            file.prefetch()
        else:
            file.set_pipelined(True)
        return file

    def close(self) -> None:
        """End the connection."""
        self.client.close()


def _configured(host: str) -> Dict[str, Any]:
    """Return what ~/.ssh/config says about a host, by keys in lower case."""
    path = Path("~/.ssh/config").expanduser()
    if not path.is_file():
        return {}
    config = paramiko.SSHConfig()
    with path.open() as lines:
        config.parse(lines)
    return dict(config.lookup(host))
