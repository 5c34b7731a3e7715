"""Storage servers on loopback: S3, Google Cloud Storage and sftp, and a proxy that is slow, cut or mended."""

from __future__ import annotations

import contextlib
import getpass
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import pytest

from tests.support.bounded import wait_until

SECRET = "SeCrEtAcCeSsKeY0123456789"
KEY_ID = "AKIAKEYIDOFTHETESTS1"
BUCKET = "bucket"
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_RUN_SSHD = Path("/run/sshd")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


class Server:
    """A server process that can be killed and started again on its port."""

    def __init__(self, port: int, command: List[str], variables: Optional[Dict[str, str]] = None) -> None:
        self.port, self._command, self._variables = port, command, variables or {}
        self._process: Optional[subprocess.Popen[bytes]] = None

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        environment = {**os.environ, **self._variables}
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet, env=environment)
        assert wait_until(lambda: answers(self.port)), f"{self._command[0]} does not listen"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End the server and, for sshd, the processes of its sessions."""
        if self._process is None:
            return
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self._process.pid)], capture_output=True, text=True, check=False
        )
        self._process.kill()
        self._process.wait()
        for pid in children.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        self._process = None


class Proxy:
    """Forwards connections of its `port` to another port, at most at a rate; `cut` loses all of them until `mend`."""

    def __init__(self, target: int) -> None:
        self._target, self.bytes_per_s = target, None  # type: ignore[var-annotated]
        self._is_cut = self._has_ended = False
        self._open: List[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.forwarded_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def stop(self) -> None:
        self._has_ended = True
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while not self._has_ended:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
            except OSError:
                near.close()
                continue
            self._open += [near, far]
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError), near, far:
            while not self._is_cut:
                ready, _, _ = select.select([near, far], [], [], 0.2)
                for each in ready:
                    data = each.recv(1 << 12 if self.bytes_per_s else 1 << 16)
                    if not data:
                        return
                    (far if each is near else near).sendall(data)
                    self.forwarded_bytes += len(data)
                    if self.bytes_per_s:
                        time.sleep(len(data) / self.bytes_per_s)


def _needs(extra: str, *packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'raypod[{extra}]'")


def s3_server(denied: bool = False) -> Server:
    """Return moto's server, which keeps objects in memory. `denied`: it accepts no key after the first request."""
    _needs("dev,s3", "moto", "s3fs", "boto3")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return Server(port, command, {"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if denied else {})


def gs_server() -> Server:
    """Return an emulated Google Cloud Storage, which keeps objects in memory."""
    _needs("dev,gs", "gcp_storage_emulator", "gcsfs")
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    return Server(port, [*command, "--in-memory", f"--default-bucket={BUCKET}"])


def use_gs(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let gcsfs in this process and its children use a server, without credentials."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it needs gRPC, which the emulator has not
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the S3 libraries of this process and its children use a server and its credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def create_bucket(port: int) -> None:
    import boto3

    keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket=BUCKET)


def _new_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30)


@contextlib.contextmanager
def sftp_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuple[Server, Path]]:
    """Yield OpenSSH's server with its own keys, and the home folder whose ~/.ssh can use it."""
    _needs("sftp", "paramiko")
    if _SSHD is None or not shutil.which("ssh-keygen"):
        pytest.skip("OpenSSH's server is not installed")
    program = _sshd_command()
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    _new_key(folder / "host_key")
    _new_key(home / ".ssh" / "id_ed25519")
    shutil.copy(str(home / ".ssh" / "id_ed25519.pub"), str(folder / "authorized_keys"))
    server = Server(free_port(), [*program, "-D", "-f", str(folder / "sshd_config")])
    (folder / "sshd_config").write_text(
        f"Port {server.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
        "PasswordAuthentication no\nMaxStartups 100\n"
    )
    _allow_failures(program, folder / "sshd_config")
    know_host(folder, home, server.port)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    server.start()
    yield server, home
    server.kill()


def _sshd_command() -> List[str]:
    """Return the command that starts sshd. As root it needs a folder that may not exist: then in an own /run."""
    assert _SSHD is not None
    if os.getuid() != 0 or _RUN_SSHD.exists():
        return [_SSHD]
    script = 'mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, _SSHD]
    if not shutil.which("unshare") or subprocess.run([*command[:-1], "true"], check=False, timeout=30).returncode:
        pytest.skip(f"{_RUN_SSHD}, which sshd needs, does not exist, and mounting a file system is not permitted here")
    return command


def _allow_failures(program: List[str], config: Path) -> None:
    """Let OpenSSH 9.8 and later answer a host whose connections failed; older versions do not know the option."""
    before = config.read_text()
    config.write_text(f"{before}PerSourcePenalties no\n")
    checked = subprocess.run([*program, "-t", "-f", str(config)], capture_output=True, check=False, timeout=30)
    if checked.returncode:
        config.write_text(before)


def know_host(folder: Path, home: Path, port: int) -> None:
    """Add the key of the server at a port to the known hosts."""
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    with (home / ".ssh" / "known_hosts").open("a") as file:
        file.write(f"[127.0.0.1]:{port} {key}\n")


def sftp_url(port: int, folder: Path) -> str:
    return f"sftp://{getpass.getuser()}@127.0.0.1:{port}{folder}"
