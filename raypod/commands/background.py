"""Start a command that outlives this one: as a process in a session of its own, or as a Ray job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Optional, Sequence, Type

from typing_extensions import Protocol

from raypod.cli import INTERRUPTED
from raypod.errors import RunError
from raypod.fleet.ray_jobs import JobServer
from raypod.host import job_driver
from raypod.host.process import process_start_ticks

# Ray kills a job that needs longer after `ray job stop`: a long call and a large checkpoint, as for `raypod stop`.
_STOP_WITHIN_S = 900
_START_WITHIN_S = 60.0  # for Ray to start the process of a job
_POLL_S, _SEND_S, _END_S = 0.5, 10.0, 10.0
_LONGEST_SOCKET = 100  # bytes of its path, by sockaddr_un
_LONGEST_NAME, _LONGEST_CAUSE = 40, 300


class Background(Protocol):
    """A command that is being started; `pid` is its process, and `text` describes it."""

    pid: int
    text: str

    def begin(self) -> None:
        """Let it begin."""

    def poll(self) -> Optional[int]:
        """Return its exit code; None while it runs."""

    def leave(self) -> None:
        """Leave it to itself."""


class BackgroundProcess:
    """A process in a session of its own."""

    def __init__(self, command: Sequence[str], output: BinaryIO) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self._process.pid
        self.text = f"Supervisor: pid {self.pid}"

    def begin(self) -> None:
        """It has begun."""

    def poll(self) -> Optional[int]:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def leave(self) -> None:
        """Leave it to itself."""
        self._process.returncode = 0  # prevents Popen's ResourceWarning: the process continues on purpose


class RayJob:
    """A Ray job. Its process waits until `begin` for the environment; leaving the context before that ends the job."""

    def __init__(self, server: JobServer, name: str, command: Sequence[str], log: Path) -> None:
        """Submit the job, and wait until its process runs. `name` is the beginning of its submission id.

        Raises:
            RunError: the server rejects it, or Ray does not start it within 60 s.
        """
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:_LONGEST_NAME]
        self.submission_id = f"raypod-{name}-{secrets.token_hex(4)}"
        self._server, self._folder = server, _private_folder()
        self._connection: Optional[socket.socket] = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                path = f"{self._folder}/socket"
                listener.bind(path)
                listener.listen(1)
                listener.settimeout(_POLL_S)
                own = [sys.executable, "-I", job_driver.__file__, path, str(log.resolve())]
                entrypoint = " ".join(map(shlex.quote, ["exec", *own, *command]))
                server.submit(self.submission_id, entrypoint, {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WITHIN_S)})
                self._connection = self._accept(listener)
                self.pid = self._check_peer(self._connection)
        except BaseException:
            self._stop()
            raise
        self._started_ticks = process_start_ticks(self.pid)
        self.text = f"Ray job: {self.submission_id} on {server.url}, pid {self.pid}"

    def begin(self) -> None:
        """Send the environment and the working folder of this process; RunError if the job has ended meanwhile."""
        assert self._connection is not None
        message = {"environment": dict(os.environ), "folder": str(Path.cwd())}
        try:
            self._connection.sendall(json.dumps(message).encode())
        except OSError as error:
            self._stop()
            raise RunError(f"Ray job {self.submission_id} has ended at its start: {error.strerror}") from None
        self._close()

    def poll(self) -> Optional[int]:
        """Return its exit code; None while it runs."""
        if process_start_ticks(self.pid) == self._started_ticks:
            return None
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            with contextlib.suppress(RunError):
                job = self._server.job(self.submission_id)
                if job.exit_code is not None:
                    return job.exit_code
                if job.has_ended:
                    return INTERRUPTED  # stopped
            time.sleep(_POLL_S)
        return 1

    def leave(self) -> None:
        """Leave it to itself."""

    def __enter__(self) -> RayJob:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], _: Optional[TracebackType]
    ) -> None:
        if self._connection is not None:
            self._stop()

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + _START_WITHIN_S
        while True:
            with contextlib.suppress(socket.timeout):
                connection, _ = listener.accept()
                connection.settimeout(_SEND_S)
                return connection
            job = self._server.job(self.submission_id)
            if job.has_ended:
                cause = " ".join(job.message.split())[-_LONGEST_CAUSE:]
                raise RunError(f"Ray job {self.submission_id} has ended at its start: {cause}")
            if time.monotonic() > deadline:
                raise RunError(f"Ray has not started job {self.submission_id} within {_START_WITHIN_S:g} s")

    def _check_peer(self, connection: socket.socket) -> int:
        """Return the pid of the job's process. RunError if it is another user's, host's or cluster's."""
        pid, user = job_driver.peer_of(connection)
        if user != os.getuid() or pid == 0:
            raise RunError(f"Ray job {self.submission_id} runs as another user or in another container")
        try:
            cluster = connection.recv(1 << 12).decode()
        except OSError as error:
            raise RunError(f"Ray job {self.submission_id} has ended at its start: {error}") from None
        if cluster.rpartition(":")[2] != self._server.cluster.rpartition(":")[2]:
            raise RunError(f"{self._server.url} is the job server of another Ray cluster, {cluster}")
        return pid

    def _stop(self) -> None:
        self._close()
        with contextlib.suppress(RunError):  # without this process the job ends by itself
            self._server.stop(self.submission_id)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="raypod-job-")
    if len(os.fsencode(folder)) > _LONGEST_SOCKET - len("/socket"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="raypod-job-", dir="/tmp")  # a new folder of mode 0700
    return folder
