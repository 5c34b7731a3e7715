"""The status endpoint of a training run, on a loopback port that `state.json` names.

`/status` is JSON, `/metrics` the Prometheus text format.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping

from typing_extensions import Protocol

from raypod.errors import ConfigError
from raypod.observe.status import registry
from raypod.observe.status.token_server import Query, Response, Route, TokenServer, json_response, read_token
from raypod.plan.layout import TOKEN_FILE
from raypod.system.signals import on_abort

_LEAST_S, _MOST_S = 0.5, 2.0  # limits of the time for which a snapshot serves all requests
_RUN_SHARE = 0.001  # of a core: the training shares its processor with the endpoint


class Cached:
    """The result of a function, which serves all clients for a time; callable from any thread."""

    def __init__(self, compute: Callable[[], Any], share: float = 1.0) -> None:
        """Compute the result so rarely that this takes at most a share of a core, but every 0.5 to 2 s on request."""
        self._compute, self._share, self._lock = compute, share, threading.Lock()
        self._value: Any = None
        self._expires_s = -math.inf

    def __call__(self) -> Any:
        """Return the result, at most 2 s old."""
        with self._lock:
            if time.monotonic() > self._expires_s:
                began_s = time.thread_time()
                self._value = self._compute()
                cpu_s = time.thread_time() - began_s
                self._expires_s = time.monotonic() + min(_MOST_S, max(_LEAST_S, cpu_s / self._share))
            return self._value


def snapshot_route(snapshot: Callable[[], Mapping[str, Any]]) -> Route:
    """Return the route that serves a snapshot as JSON."""
    return cached_route(lambda: json_response(snapshot()))


def cached_route(respond: Callable[[], Response]) -> Route:
    """Return the route that serves a response, at most 2 s old, which costs a run almost nothing."""
    cached = Cached(respond, _RUN_SHARE)

    def serve(query: Query) -> Response:
        response: Response = cached()
        return response

    return serve


class StateWriter(Protocol):
    """The file that names the status endpoint of a process: `run_state.StateFile`, or `launch_file.LaunchFile`."""

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
        stack.enter_context(registry.registered(folder, server.port, server.token))
        yield


def _remove(path: Path, token: str) -> None:
    """Remove a token file, unless another process has taken over the folder and written its own."""
    with contextlib.suppress(OSError):  # the folder is gone, or on a disk that does not answer
        if read_token(path) == token:
            path.unlink()
