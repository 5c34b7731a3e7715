"""A server on the loopback interface, whose port all users of the host can reach, that none of them can block."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from typing import Any, Dict, Set


class BoundedServer(socketserver.ThreadingTCPServer):
    """Serves every client in a thread of its own. The handler of a request calls `admit` once that has its secret.

    A client that is not admitted within `admit_within_s` is disconnected, however it divides its bytes. With
    `max_clients` the one that has waited longest without being admitted makes room for a new one.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    max_clients = 16
    admit_within_s = 10.0

    def __init__(self, address: Any, handler: Any) -> None:
        self._lock = threading.Lock()
        self._waiting: Dict[socket.socket, float] = {}  # deadlines, oldest first
        self._admitted: Set[socket.socket] = set()
        super().__init__(address, handler)

    def admit(self, client: socket.socket) -> None:
        """Exempt a client that has shown its secret from the limits of time and number."""
        with self._lock:
            if self._waiting.pop(client, None) is not None:
                self._admitted.add(client)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread; disconnect it if all others are admitted and there are too many."""
        with self._lock:
            if len(self._waiting) + len(self._admitted) >= self.max_clients:
                oldest = next(iter(self._waiting), None)
                if oldest is None:
                    self.shutdown_request(request)
                    return
                self._disconnect(oldest)
            self._waiting[request] = time.monotonic() + self.admit_within_s
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Disconnect the clients whose time is over; the loop of the server calls it."""
        now_s = time.monotonic()
        with self._lock:
            for client in [each for each, deadline_s in self._waiting.items() if deadline_s <= now_s]:
                self._disconnect(client)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is disconnected."""

    def _disconnect(self, client: socket.socket) -> None:
        """End the reads of a client's thread, which then ends."""
        del self._waiting[client]
        with contextlib.suppress(OSError):  # the client has left
            client.shutdown(socket.SHUT_RDWR)

    def _forget(self, client: socket.socket) -> None:
        with self._lock:
            self._waiting.pop(client, None)
            self._admitted.discard(client)
