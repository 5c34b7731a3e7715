"""Only one `raypod up` at a time starts a cluster, from whichever machine and user: they would undo each other's steps.

A process on the head holds a lock for as long as its ssh connection lasts, so that none stays when `up` is killed.
After a lost network, sshd can keep the connection for hours: the message names the process.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import threading
import time
from typing import Callable, Dict, Iterator, Optional
from urllib.parse import quote

from raypod.errors import ClusterError
from raypod.plan.cluster import Cluster
from raypod.runtime import ssh

_WITHIN_S = 30.0
_END_S = 5.0
_PROGRAM = """
import fcntl, json, os, sys
folder = os.path.expanduser("~/.raypod")
os.makedirs(folder, exist_ok=True)
file, holder = open(os.path.join(folder, sys.argv[1]), "a+"), ""
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.truncate(0)
    file.write("%s; if it has ended, `kill %d` on the head" % (sys.argv[2], os.getpid()))
    file.flush()
except BlockingIOError:
    file.seek(0)
    holder = file.read() or "another command"
print(json.dumps({"holder": holder}), flush=True)
if not holder:
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a cluster within the context. A head that cannot lock is a warning.

    Raises:
        ClusterError: another `raypod up` holds it; the message names it.
    """
    head = cluster.hosts[0]
    since = time.strftime("%H:%M:%S")
    owner = f"pid {os.getpid()} of {_user()} on {socket.gethostname()} (since {since} there)"
    words = ["python3", "-c", _PROGRAM, f"up-{quote(cluster.name, safe='')}.lock", owner]
    with ssh.started(head, cluster.ssh, words) as process:
        answer = _first_answer(process)
        if answer is None:
            say(f"warning: {head.name}: cannot lock {cluster.name}; no other `raypod up` may run for it now")
        elif answer["holder"]:
            raise ClusterError(
                f"{cluster.name}: another `raypod up` runs: {answer['holder']}; otherwise wait until it has ended"
            )
        yield


def _first_answer(process: subprocess.Popen[bytes]) -> Optional[Dict[str, str]]:
    """Return what the program prints; None if it fails or does not answer in time."""
    timer = threading.Timer(_WITHIN_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:  # a login shell prints others
            answer = ssh.Result(0, line.decode(errors="replace"), "").json_object("holder")
            if answer is not None:
                return answer
        return None
    finally:
        timer.cancel()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return f"uid {os.getuid()}"
