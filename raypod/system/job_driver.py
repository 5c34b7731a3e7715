"""The entrypoint of a Ray job: become the command of the process that has submitted the job.

`python -I job_driver.py SOCKET LOG PROGRAM ARGUMENT...`: the environment and the working folder come through a Unix
socket, so that they are neither in the job's metadata nor on a disk. The output goes to the job's log and to LOG.

This file needs only Python 3.8's library: it runs before PYTHONPATH is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # this is the name of the variable
_WITHIN_S = 30.0
_BYTES = 1 << 16


def main(arguments: List[str]) -> NoReturn:
    """Replace this process by the command; exit with 2 if the submitting process has ended or is another user's."""
    path, log, *command = arguments
    try:
        message = _receive(path)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"raypod: error: the command that submitted this job is not there any more: {error}\n")
        sys.exit(2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, by which `raypod stop` ends a run
    os.chdir(message["folder"])
    _copy_output(log)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(command[0], command, _environment(message["environment"], os.environ))


def peer_of(connection: socket.socket) -> Tuple[int, int]:
    """Return the pid and the user of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def submission_id_of(environment: Mapping[str, str]) -> Optional[str]:
    """Return the submission id of the Ray job whose process has this environment; None if it is none."""
    try:
        found = json.loads(environment[JOB_CONFIG])["metadata"]["job_submission_id"]
    except (KeyError, ValueError, TypeError):
        return None
    return str(found)


def _receive(path: str) -> Dict[str, Any]:
    """Return what the submitting process sends. OSError if there is none, ValueError if it ends meanwhile."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_WITHIN_S)
        connection.connect(path)
        if peer_of(connection)[1] != os.getuid():
            raise PermissionError("it is another user's")
        connection.sendall(os.environ["RAY_ADDRESS"].encode())
        connection.shutdown(socket.SHUT_WR)
        pieces = list(iter(lambda: connection.recv(_BYTES), b""))
    message: Dict[str, Any] = json.loads(b"".join(pieces).decode())
    return message


def _environment(sent: Dict[str, str], own: Mapping[str, str]) -> Dict[str, str]:
    """Return the environment that was sent, with the cluster and the id of the job.

    Not with the job's runtime environment, which only sets how Ray stops it: the processes of the run need none.
    """
    job = json.loads(own.get(JOB_CONFIG, "{}"))
    return {**sent, "RAY_ADDRESS": own["RAY_ADDRESS"], JOB_CONFIG: json.dumps({"metadata": job.get("metadata", {})})}


def _copy_output(log: str) -> None:
    """Send the output of this process to its standard output, and to a file.

    A process of its own copies it, in another session, and until all who write have ended: neither `ray job stop` nor a
    crash loses the last lines.
    """
    source, target = os.pipe()
    copier = os.fork()
    if copier == 0:
        os.setsid()
        if os.fork() == 0:  # it is no child of the command, which therefore does not have to wait for it
            os.close(target)
            _copy(source, log)
        os._exit(0)
    os.waitpid(copier, 0)
    os.close(source)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _copy(source: int, log: str) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outputs = [1, os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)]
    for piece in iter(lambda: os.read(source, _BYTES), b""):
        for output in outputs:
            rest = memoryview(piece)
            with contextlib.suppress(OSError):  # a full disk loses lines, and does not stop the run
                while rest:
                    rest = rest[os.write(output, rest) :]
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
