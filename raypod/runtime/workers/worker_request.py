"""Starts a worker of Ray: asks the template of this host to fork it, else executes the interpreter. A script.

The arguments are the interpreter and those that it would get. This process imports little, because it only exists until
the worker does: the raylet gets to know the pid of the worker from the worker itself, when that registers.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Dict, List, Union

_WORKER = "default_worker.py"  # of Ray; a worker with a runtime environment is started by another script
_TEMPLATE_S = 30.0  # for the template to import its modules and to answer; Ray waits 60 s for a worker
_MARGIN = 32  # more descriptors than a worker inherits

Request = Dict[str, Union[str, int, List[str], List[int], Dict[str, str]]]


def fork(path: str, arguments: List[str]) -> bool:
    """Ask a template for a worker; return whether it exists."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TEMPLATE_S)
        connection.connect(path)
        credentials = struct.Struct("3i")  # pid, uid, gid
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        if credentials.unpack(found)[1] != os.getuid():  # it would get the environment, and the descriptors
            raise PermissionError("a template of another user")
        descriptors = inherited(connection.fileno())
        request: Request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": str(Path.cwd()),
            "descriptors": descriptors,
            # The raylet sets these for the process that it starts.
            "niceness": os.nice(0),
            "oom_score": Path("/proc/self/oom_score_adj").read_text(),
        }
        text = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        connection.sendmsg([len(text).to_bytes(4, "little")], rights)
        connection.sendall(text)
        if connection.recv(1) != b"y":
            return False
        connection.sendall(b"y")  # without this answer, as after a timeout, the worker ends at once
        return True


def inherited(own: int) -> List[int]:
    """Return the open descriptors of this process, except that of its connection."""
    found = []
    for each in range(_MARGIN):
        with contextlib.suppress(OSError):
            if each != own and os.get_inheritable(each):
                found.append(each)
    return found


if __name__ == "__main__":
    python, words = sys.argv[1], sys.argv[2:]
    is_forked = False
    if words and words[0].endswith(_WORKER):
        with contextlib.suppress(OSError):  # the template has ended, or is too slow
            is_forked = fork(os.environ["RAYPOD_TEMPLATE"], words)
    if not is_forked:
        os.execv(python, [python, *words])
