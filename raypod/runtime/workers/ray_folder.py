"""The folder RAY_TMPDIR of a local Ray session: its sockets and logs are created there."""

from __future__ import annotations

import os
import tempfile

from raypod.errors import ClusterError
from raypod.system.private import make_private

# The longest path of a Unix socket, and the longest one that Ray creates below RAY_TMPDIR.
_MAX_SOCKET_BYTES = 107
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"


def private_tmpdir() -> str:
    """Return the folder for RAY_TMPDIR of this user's processes: the given one, or one in it if others can use that.

    Ray lets all users write to the folders of its sockets and logs.

    Raises:
        ClusterError: it belongs to another user.
    """
    given = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if not make_private(given):
        return given
    folder = f"{given}/raypod-{os.getuid()}"
    problem = make_private(folder)
    if problem:
        raise ClusterError(f"no folder for the files of Ray: {problem}, or set RAY_TMPDIR to a folder of your own")
    return folder


def socket_folder() -> str:
    """Return `private_tmpdir()`, in which a local session creates its sockets.

    Raises:
        ClusterError: it belongs to another user, or its path is too long.
    """
    folder = private_tmpdir()
    size, most = len(os.fsencode(folder)), _MAX_SOCKET_BYTES - len(_SOCKET.format(pid=os.getpid()))
    if size > most:
        raise ClusterError(
            f"the path of the temporary folder {folder} is too long for the Unix sockets of Ray: it has {size} bytes, "
            f"at most {most} are possible; set RAY_TMPDIR (or TMPDIR) to a folder with a shorter path"
        )
    return folder
