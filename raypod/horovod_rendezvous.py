"""The key-value server at which the processes of a real Horovod find each other over Gloo.

Horovod's own server listens on every interface and answers everybody. This one speaks the same protocol (HTTP: PUT, GET
and DELETE of /scope/key), listens on one address and answers the hosts of the run alone. It needs no Horovod.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import sys
import threading
from typing import Dict, Iterable, Tuple

_MOST_BYTES = 1 << 20  # of one value: Gloo's are the addresses of one rank, some hundred bytes for each other rank
_REQUEST_TIMEOUT_S = 3.0
_OK, _BAD_REQUEST, _NOT_FOUND, _TIMEOUT, _TOO_LARGE = 200, 400, 404, 408, 413


class HorovodRendezvous:
    """The server, on a port that the system chooses, from its birth until `close`."""

    def __init__(self, address: str, hosts: Iterable[str]) -> None:
        """Listen on `address` (a name or IPv4 address of this host) and answer `hosts` (names or addresses).

        Raises:
            OSError: the address is not this host's, or a name cannot be resolved.
        """
        own = socket.gethostbyname(address)
        self._server = _Server(own, {own, *map(socket.gethostbyname, hosts)})
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod rendezvous", daemon=True)
        self._thread.start()
        self.environment: Dict[str, str] = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": own,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_address[1]),
        }

    def close(self) -> None:
        """Close the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128  # all ranks come at once

    def __init__(self, address: str, allowed: Iterable[str]) -> None:
        self.values: Dict[Tuple[str, str], bytes] = {}  # by scope and key; each access is one atomic operation
        self._allowed = frozenset(allowed)
        super().__init__((address, 0), _Handler)

    def verify_request(self, request: object, client_address: Tuple[str, int]) -> bool:
        """Whether it comes from a host of the run; said on stderr if not, for that host's Horovod only sees a reset."""
        allowed = client_address[0] in self._allowed
        if not allowed:
            hosts = ", ".join(sorted(self._allowed))
            sys.stderr.write(
                f"Horovod rendezvous: refused {client_address[0]}, which is no host of this run ({hosts})\n"
            )
        return allowed


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """The value of a key; 404 as long as there is none: Horovod asks again."""
        value = self.server.values.get(self._key())
        self._answer(_NOT_FOUND if value is None else _OK, value or b"")

    def do_PUT(self) -> None:
        """Keep a value."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._answer(_BAD_REQUEST)
        elif int(length) > _MOST_BYTES:
            self._answer(_TOO_LARGE)
        else:
            try:
                self.server.values[self._key()] = self.rfile.read(int(length))
            except socket.timeout:
                self._answer(_TIMEOUT)
            else:
                self._answer(_OK)

    def do_DELETE(self) -> None:
        """A rank (the key) has met all others in a scope: drop what it said there, so that they can meet again."""
        scope, rank = self._key()
        for key in (rank, f"rank_{rank}"):
            self.server.values.pop((scope, key), None)
        self._answer(_OK)

    def _key(self) -> Tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the output of the process is the program's."""
