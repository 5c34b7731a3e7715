"""How the processes of a real Horovod find each other over Gloo: through the store at which the instances meet.

Horovod asks a key-value server by plain HTTP (PUT, GET and DELETE of /scope/key), and can prove nothing to it. So what
it asks is a door on the loopback interface of its own host, which nobody can reach from the network, and which hands
the requests on over a connection to the store that is proved on both sides. It needs no Horovod.
"""

from __future__ import annotations

import hmac
import http.server
import os
import secrets
import socket
import socketserver
import threading
import weakref
from typing import Dict, Optional, Tuple

from typing_extensions import Protocol

_MOST_BYTES = 1 << 20  # of one value: Gloo's are the addresses of one rank, some hundred bytes for each other rank
_REQUEST_TIMEOUT_S = 3.0
_ENDS_WITHIN_S = 5.0
_OK, _BAD_REQUEST, _FORBIDDEN, _NOT_FOUND, _TIMEOUT, _TOO_LARGE, _UNAVAILABLE = 200, 400, 403, 404, 408, 413, 503


class Store(Protocol):
    """What a door leads to. RuntimeError from each, once it is gone."""

    def get(self, key: str) -> Optional[bytes]:
        """The value of a key; None if there is none."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value."""

    def delete(self, key: str) -> bool:
        """Drop a key."""

    def close(self) -> None:
        """Let go of it."""


class HorovodDoor:
    """The server, on a port of 127.0.0.1 that the system chooses, from its birth until `close`.

    Others on this host may reach the port as well. So the requests lead through a path that nobody can guess: Horovod
    makes its URLs of "http://" + HOROVOD_GLOO_RENDEZVOUS_ADDR + ":" + HOROVOD_GLOO_RENDEZVOUS_PORT + "/scope/key"
    (http_store.h of 0.28), and takes the port of the first colon.
    """

    def __init__(self, store: Store) -> None:
        """Lead to `store`, which is closed with the door."""
        self._server = _Server(store)
        port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod door", daemon=True)
        self._thread.start()
        self.environment: Dict[str, str] = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{port}/{self._server.secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def close(self) -> None:
        """Close the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ENDS_WITHIN_S)
        self._server.store.close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128  # all ranks of the host come at once

    def __init__(self, store: Store) -> None:
        self.store, self.secret = store, secrets.token_hex(16)
        super().__init__(("127.0.0.1", 0), _Handler)
        _servers.add(self)


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """The value of a key; 404 as long as there is none: Horovod asks again."""
        found = self._place()
        if found is not None:
            value = self.server.store.get("/".join(found))
            self._answer(_NOT_FOUND if value is None else _OK, value or b"")

    def do_PUT(self) -> None:
        """Keep a value."""
        found = self._place()
        if found is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._answer(_BAD_REQUEST)
        elif int(length) > _MOST_BYTES:
            self._answer(_TOO_LARGE)
        else:
            try:
                value = self.rfile.read(int(length))
            except socket.timeout:
                self._answer(_TIMEOUT)
            else:
                self.server.store.set("/".join(found), value)
                self._answer(_OK)

    def do_DELETE(self) -> None:
        """A rank (the key) has met all others in a scope: drop what it said there, so that they can meet again."""
        found = self._place()
        if found is not None:
            scope, rank = found
            for key in (rank, f"rank_{rank}"):
                self.server.store.delete(f"{scope}/{key}")
            self._answer(_OK)

    def handle_one_request(self) -> None:
        """As ever; without the store, which is gone with the instance that held it, Horovod gives up after three."""
        try:
            super().handle_one_request()
        except RuntimeError:
            self._answer(_UNAVAILABLE)
            self.close_connection = True

    def _place(self) -> Optional[Tuple[str, str]]:
        """Scope and key that are asked for; None, and an answer, for who does not know the way."""
        way, _, place = self.path.lstrip("/").partition("/")
        if not hmac.compare_digest(way.partition(":")[0].encode(), self.server.secret.encode()):
            self._answer(_FORBIDDEN)
            return None
        scope, _, key = place.partition("/")
        return f"horovod/{scope}", key

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the output of the process is the program's."""


def _serve_nobody_in_a_forked_child() -> None:
    """The thread is not there, and a port that a loader's worker holds would outlive the door."""
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_serve_nobody_in_a_forked_child)
