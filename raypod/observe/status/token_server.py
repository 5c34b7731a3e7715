"""An HTTP server for one user of this host: on loopback, read-only, and only for requests that carry a token.

The token is sent as `Authorization: Bearer TOKEN`, or, for a browser, as `?token=TOKEN`. A request without it gets 401
on every path; one that names another host than the loopback interface (DNS rebinding) gets 403.
"""

from __future__ import annotations

import hmac
import http.server
import json
import os
import secrets
import socket
import threading
import urllib.parse
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple

from raypod.errors import ConfigError
from raypod.system import files
from raypod.system.bounded_server import BoundedServer
from raypod.system.files import strict_json

ADDRESS = "127.0.0.1"
_REQUEST_TIMEOUT_S = 10.0  # for a request to arrive, and for a client to read the response
_POLL_S = 0.1
HTML = "text/html; charset=utf-8"
_HOSTS = (ADDRESS, "localhost")


class Response(NamedTuple):
    """The content of a successful response, or of one with another status code."""

    body: bytes
    content_type: str = "application/json; charset=utf-8"
    status: int = 200


def json_response(content: Any) -> Response:
    """Return content as JSON, with NaN and infinity as null."""
    return Response(strict_json(content).encode())


def error_response(status: int, message: str) -> Response:
    """Return an error as JSON, with its HTTP status code."""
    return Response(json.dumps({"error": message}).encode(), status=status)


Query = Dict[str, str]  # the last value of each parameter, without the token
Route = Callable[[Query], Response]


def check_port(port: int, setting: str = "--status-port") -> None:
    """Raise ConfigError if a port on the loopback interface is in use or not permitted."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server
            probe.bind((ADDRESS, port))
            probe.listen(1)  # binding alone succeeds beside another socket with this option that does not listen yet
    except OSError as error:
        raise _cannot_serve(port, setting, error) from None


def _cannot_serve(port: int, setting: str, error: OSError) -> ConfigError:
    return ConfigError(f"{setting} {port}: {error.strerror}; choose another port, or 0 for any free one")


class TokenServer:
    """Serves routes until `close`. Every request runs in a thread of its own.

    Attributes:
        port: the port on the loopback interface.
        token: 64 hexadecimal digits (256 bits) from the system's source of randomness.
    """

    def __init__(
        self, routes: Mapping[str, Route], port: int = 0, setting: str = "--status-port", sign_in: bytes = b""
    ) -> None:
        """Listen.

        Args:
            routes: by their path, as in "/status".
            port: 0 lets the system choose.
            setting: which sets the port, for the message of an error.
            sign_in: an HTML page; the body of the 401 of the path "/", for browsers.

        Raises:
            ConfigError: the port is in use or not permitted.
        """
        self.token = secrets.token_hex(32)
        try:
            self._server = _Server((ADDRESS, port), _Handler)
        except OSError as error:
            raise _cannot_serve(port, setting, error) from None
        self._server.routes, self._server.token, self._server.sign_in = dict(routes), self.token, sign_in
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="status-server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the server, without a path and without the token."""
        return f"http://{ADDRESS}:{self.port}"

    def write_token(self, path: Path) -> None:
        """Write the token into a file that only this user can read. OSError if that fails."""
        files.check_held(path)
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # the file may have existed with another mode
            file.write(self.token + "\n")

    def close(self) -> None:
        """Stop serving and close the port; wait for the thread, not for clients."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> TokenServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(BoundedServer):
    admit_within_s = _REQUEST_TIMEOUT_S
    routes: Dict[str, Route]
    token: str
    sign_in: bytes


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "raypod", ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Check the token, and serve the route of the path."""
        self._send(self._response())

    def __getattr__(self, name: str) -> Any:
        """Return `do_GET` for every method, so that http.server answers none of them before the token is checked."""
        if name.startswith("do_"):
            return self.do_GET
        raise AttributeError(name)

    def _response(self) -> Response:
        target = urllib.parse.urlsplit(self.path)
        query = {name: values[-1] for name, values in urllib.parse.parse_qs(target.query).items()}
        host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if host not in _HOSTS:
            return error_response(403, f"this server answers only requests to {ADDRESS}")
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else query.pop("token", "")
        query.pop("token", None)
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            if self.server.sign_in and self.command == "GET" and target.path == "/":
                return Response(self.server.sign_in, HTML, 401)
            return error_response(401, "a token is needed: Authorization: Bearer TOKEN, or ?token=TOKEN")
        self.server.admit(self.connection)
        if self.command not in ("GET", "HEAD"):
            return error_response(405, "this server is read-only: use GET")
        route = self.server.routes.get(target.path)
        if route is None:
            return error_response(404, f"no such path; there are {', '.join(sorted(self.server.routes))}")
        try:
            return route(query)
        except Exception as error:  # noqa: BLE001 - a route must not end the thread without a response
            return error_response(500, f"{type(error).__name__}: {error}")

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        if response.status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",  # the token of a page's address must not reach other sites
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the request line contains the token."""


def read_token(path: Path) -> str:
    """Return the token of a file that `TokenServer.write_token` wrote. OSError if it cannot be read."""
    return path.read_text().strip()
