"""An HTTP proxy through which a real Horovod's processes reach the rendezvous store of the instances.

Horovod's Gloo controller uses a key-value server over plain HTTP (PUT, GET and DELETE of /scope/key) without any
authentication. So it connects to this proxy on the loopback interface of its own host, which is not reachable from the
network; the proxy forwards the requests over the authenticated connection to the store. Needs no Horovod.
"""

from __future__ import annotations

import hmac
import http.server
import os
import secrets
import socket
import threading
import weakref
from typing import Dict, Optional, Tuple

from raypod.system.bounded_server import BoundedServer
from raypod.system.sdk import rendezvous

_LARGEST_VALUE_BYTES = 1 << 20  # Gloo stores the addresses of one rank: some hundred bytes per other rank
_REQUEST_TIMEOUT_S = 3.0
_JOIN_TIMEOUT_S = 5.0
_OK, _BAD_REQUEST, _FORBIDDEN, _NOT_FOUND, _TIMEOUT, _TOO_LARGE, _UNAVAILABLE = 200, 400, 403, 404, 408, 413, 503


class HorovodProxy:
    """The proxy, on a port of 127.0.0.1 that the system chooses, from construction until `close`.

    Other users of this host can connect to the port, so requests must contain a secret path. Horovod 0.28
    (http_store.h) builds its URLs as "http://" + HOROVOD_GLOO_RENDEZVOUS_ADDR + ":" + HOROVOD_GLOO_RENDEZVOUS_PORT +
    "/scope/key" and takes the port after the first colon, so the path can be appended to the address.
    """

    def __init__(self, store: rendezvous.StoreClient) -> None:
        """Forward requests to `store`, which is closed with the proxy."""
        self._server = _Server(store)
        port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="horovod proxy", daemon=True)
        self._thread.start()
        self.environment: Dict[str, str] = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{port}/{self._server.secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def close(self) -> None:
        """Close the port, the thread and the store."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._server.store.close()


class _Server(BoundedServer):
    max_clients = 256  # all ranks of the host connect at the same time
    admit_within_s = _REQUEST_TIMEOUT_S

    def __init__(self, store: rendezvous.StoreClient) -> None:
        self.store, self.secret = store, secrets.token_hex(16)
        super().__init__(("127.0.0.1", 0), _Handler)
        _servers.add(self)


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handles one request."""

    server: _Server
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Return the value of a key; 404 if there is none yet: Horovod retries."""
        found = self._scope_and_key()
        if found is not None:
            value = self.server.store.get("/".join(found))
            self._answer(_NOT_FOUND if value is None else _OK, value or b"")

    def do_PUT(self) -> None:
        """Set the value of a key."""
        found = self._scope_and_key()
        if found is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._answer(_BAD_REQUEST)
        elif int(length) > _LARGEST_VALUE_BYTES:
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
        """Delete the keys of a rank that has connected to all others in a scope, so that it can be used again."""
        found = self._scope_and_key()
        if found is not None:
            scope, rank = found
            for key in (rank, f"rank_{rank}"):
                self.server.store.delete(f"{scope}/{key}")
            self._answer(_OK)

    def handle_one_request(self) -> None:
        """Handle a request; 503 if the store is gone with the instance that hosted it (Horovod retries three times)."""
        try:
            super().handle_one_request()
        except RuntimeError:
            self._answer(_UNAVAILABLE)
            self.close_connection = True

    def _scope_and_key(self) -> Optional[Tuple[str, str]]:
        """Return the requested scope and key. If the secret path is wrong, send 403 and return None."""
        secret, _, rest = self.path.lstrip("/").partition("/")
        if not hmac.compare_digest(secret.partition(":")[0].encode(), self.server.secret.encode()):
            self._answer(_FORBIDDEN)
            return None
        self.server.admit(self.connection)
        scope, _, key = rest.partition("/")
        return f"horovod/{scope}", key

    def _answer(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the output of the process belongs to the program."""


def _close_in_forked_child() -> None:
    """Close the sockets: a forked data loader worker has no server thread and would keep the port open."""
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
