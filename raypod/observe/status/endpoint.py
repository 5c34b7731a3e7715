"""The status endpoint of a run, on a loopback port that `state.json` names, and the registry of those of this host.

`/status` is JSON, `/metrics` the Prometheus text format.

The folder is `/tmp/raypod-UID`, or RAYPOD_RUNTIME_DIR; only its user can read it. An entry contains the token of the
endpoint. It counts only while its process runs (pids are reused, so the start time is compared) and only in the same
pid and network namespaces: a container that shares /tmp has other processes and another loopback interface.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Union

from typing_extensions import Protocol

from raypod.errors import ConfigError
from raypod.observe.status.token_server import Query, Response, Route, TokenServer, json_response, read_token
from raypod.plan.layout import TOKEN_FILE
from raypod.system.files import parse_json
from raypod.system.private import make_private, read_file_of, why_not_private
from raypod.system.process import process_start_ticks
from raypod.system.signals import on_abort

_LEAST_S, _MOST_S = 0.5, 2.0  # limits of the time for which a snapshot serves all requests
_RUN_SHARE = 0.001  # of a core: the training shares its processor with the endpoint


def cached_route(respond: Callable[[], Response], share: float = _RUN_SHARE) -> Route:
    """Return the route that serves a response, at most 2 s old, to all clients; callable from any thread.

    It is computed so rarely that this takes at most a share of a core, but every 0.5 to 2 s on request.
    """
    lock, response, expires_s = threading.Lock(), Response(b""), -math.inf

    def serve(query: Query) -> Response:
        nonlocal response, expires_s
        with lock:
            if time.monotonic() > expires_s:
                began_s = time.thread_time()
                response = respond()
                cpu_s = time.thread_time() - began_s
                expires_s = time.monotonic() + min(_MOST_S, max(_LEAST_S, cpu_s / share))
            return response

    return serve


def snapshot_route(snapshot: Callable[[], Mapping[str, Any]]) -> Route:
    """Return the route that serves a snapshot as JSON."""
    return cached_route(lambda: json_response(snapshot()))


class StateWriter(Protocol):
    """The file that names the status endpoint of a process: `run_state.StateFile`, or `launch_status.LaunchFile`."""

    def serve_status(self, port: int, token_file: str) -> None:
        """Publish the status endpoint of this process."""


@contextlib.contextmanager
def served(routes: Dict[str, Route], folder: Path, port: int, state: StateWriter) -> Iterator[TokenServer]:
    """Serve routes within the context, and publish the server. ConfigError if the port is in use or not permitted."""
    with TokenServer(routes, port) as server, published(server, folder, state):
        yield server


@contextlib.contextmanager
def published(server: TokenServer, folder: Path, state: StateWriter) -> Iterator[None]:
    """Write the token of a server into `folder` and its port into the state, within the context.

    `raypod monitor` finds the endpoint through the registry of this host. ConfigError if the token cannot be written.
    """
    token_file = folder / TOKEN_FILE
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, token_file, server.token)
        stack.enter_context(on_abort(lambda error: _remove(token_file, server.token)))
        try:
            server.write_token(token_file)
        except OSError as error:
            raise ConfigError(f"cannot write {token_file}: {error.strerror}") from None
        state.serve_status(server.port, str(token_file))
        stack.enter_context(registered(folder, server.port, server.token))
        yield


def _remove(path: Path, token: str) -> None:
    """Remove a token file, unless another process has taken over the folder and written its own."""
    with contextlib.suppress(OSError):  # the folder is gone, or on a disk that does not answer
        if read_token(path) == token:
            path.unlink()


VARIABLE = "RAYPOD_RUNTIME_DIR"
_PARENT, _PREFIX = Path("/tmp"), "raypod-"  # not TMPDIR, which job schedulers set per job
_MAX_BYTES = 16384  # of an entry
_NAMESPACES = ("pid", "net")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A process that serves its status on the loopback interface."""

    pid: int
    started_ticks: int
    uid: int
    run_dir: str
    port: int
    token: str = dataclasses.field(repr=False)


@contextlib.contextmanager
def registered(run_dir: Path, port: int, token: str) -> Iterator[Optional[Path]]:
    """List this process's endpoint within the context; yield the file, None if there is no safe folder for it.

    A process that cannot be listed is still found through its run folder.
    """
    path = _write(run_dir, port, token)
    with contextlib.ExitStack() as stack:
        if path is not None:
            unregister = functools.partial(_unregister, path)
            stack.callback(unregister)
            stack.enter_context(on_abort(lambda error: unregister()))
        yield path


def entries() -> List[Entry]:
    """Return the live endpoints of this user, and of all others if this process may read their folders (root)."""
    if os.environ.get(VARIABLE):
        folders = [own_folder()]
    else:
        folders = sorted(path for path in _PARENT.glob(f"{_PREFIX}*") if path.name[len(_PREFIX) :].isdigit())
    return [entry for folder in folders for entry in _entries_in(folder)]


def own_folder() -> Path:
    """Return the folder of this user's entries, which may not exist."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen) if chosen else _PARENT / f"{_PREFIX}{os.getuid()}"


def _write(run_dir: Path, port: int, token: str) -> Optional[Path]:
    folder, pid = own_folder(), os.getpid()
    facts: Dict[str, Union[int, str, List[str]]] = {
        "pid": pid,
        "started_ticks": process_start_ticks(pid) or 0,
        "namespaces": _namespaces(),
        "run_dir": os.path.realpath(run_dir),  # by which a reader finds it, however both have named it
        "port": port,
        "token": token,
    }
    path = folder / f"{pid}-{port}.json"
    try:
        if make_private(str(folder)):
            return None
        _remove_stale(folder)
        partial = path.with_suffix(".partial")
        descriptor = os.open(str(partial), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(facts, file)
        partial.replace(path)
    except OSError:
        return None
    return path


def _entries_in(folder: Path) -> Iterator[Entry]:
    try:
        uid = folder.lstat().st_uid
        files = sorted(folder.glob("*.json")) if _belongs(folder, uid) and not why_not_private(str(folder), uid) else []
    except OSError:  # another user's
        return
    for file in files:
        content = _read(file)
        if content is not None and _is_alive(content):
            keys = ("pid", "started_ticks", "run_dir", "port", "token")
            with contextlib.suppress(KeyError):  # of another version
                yield Entry(uid=uid, **{key: content[key] for key in keys})


def _belongs(folder: Path, uid: int) -> bool:
    """Return whether a folder is named after its owner: another user could offer entries under a foreign name."""
    return bool(os.environ.get(VARIABLE)) or folder.name == f"{_PREFIX}{uid}"


def _read(path: Path) -> Optional[Dict[str, Any]]:
    """Return the content of a file of the folder's owner; None for anything else."""
    try:
        content = parse_json(read_file_of(str(path), (path.parent.lstat().st_uid,), _MAX_BYTES) or b"")
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _is_alive(content: Dict[str, Any]) -> bool:
    pid = content.get("pid")
    if content.get("namespaces") != _namespaces() or not isinstance(pid, int):
        return False
    return process_start_ticks(pid) == content.get("started_ticks")


def _remove_stale(folder: Path) -> None:
    """Remove the entries of processes of these namespaces that were killed."""
    for path in folder.glob("*.json"):
        content = _read(path)
        if content is not None and content.get("namespaces") == _namespaces() and not _is_alive(content):
            _unregister(path)


def _namespaces() -> List[str]:
    found = []
    for name in _NAMESPACES:
        with contextlib.suppress(OSError):  # a kernel without namespaces
            found.append(os.readlink(f"/proc/self/ns/{name}"))
    return found


def _unregister(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
