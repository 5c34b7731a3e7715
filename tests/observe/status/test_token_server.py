from __future__ import annotations

import contextlib
import http.client
import socket
import stat
from pathlib import Path
from typing import Dict, Iterator, Optional, Tuple

import pytest

from raypod.errors import ConfigError
from raypod.observe.status import token_server
from raypod.observe.status.token_server import TokenServer, json_response, read_token
from raypod.system.bounded_server import BoundedServer
from tests.support.bounded import wait_until


@pytest.fixture
def server() -> Iterator[TokenServer]:
    with TokenServer({"/status": json_response_of, "/broken": broken}) as opened:
        yield opened


def json_response_of(query: Dict[str, str]):  # type: ignore[no-untyped-def]
    return json_response({"query": query, "loss": float("nan")})


def broken(query: Dict[str, str]):  # type: ignore[no-untyped-def]
    raise ValueError("no state")


def request(
    server: TokenServer, path: str, method: str = "GET", headers: Optional[Dict[str, str]] = None
) -> Tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def bearer(server: TokenServer) -> Dict[str, str]:
    return {"Authorization": f"Bearer {server.token}"}


PATHS = ["/", "/status", "/broken", "/../", "/../../etc/passwd", "/%2e%2e/", "//status", "/status/", "/nothing?x=1"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_every_path_and_method_needs_the_token_first(server: TokenServer, method: str) -> None:
    for path in PATHS:
        assert request(server, path, method)[0] == 401
        assert request(server, path, method, {"Authorization": "Bearer " + "0" * 64})[0] == 401
        assert request(server, f"{path}{'&' if '?' in path else '?'}token=", method)[0] == 401
    if method not in ("GET", "HEAD"):
        assert request(server, "/status", method, bearer(server))[0] == 405, "it is read-only"


def test_the_token_is_accepted_as_header_and_as_parameter(server: TokenServer) -> None:
    assert request(server, "/status?a=1", headers=bearer(server)) == (200, '{"query": {"a": "1"}, "loss": null}')
    assert request(server, f"/status?token={server.token}") == (200, '{"query": {}, "loss": null}')


def test_unknown_paths_contain_nothing_and_errors_of_routes_are_reported(server: TokenServer) -> None:
    for path in ("/../", "/../../etc/passwd", "/nothing", "/status/"):
        status, body = request(server, path, headers=bearer(server))
        assert (status, "no such path" in body) == (404, True)
    assert request(server, "/broken", headers=bearer(server)) == (500, '{"error": "ValueError: no state"}')


def test_another_host_name_is_refused_and_a_client_that_sends_nothing_stops_no_others(server: TokenServer) -> None:
    assert request(server, "/status", headers={**bearer(server), "Host": "evil.example"})[0] == 403
    with socket.create_connection(("127.0.0.1", server.port)):
        assert request(server, "/status", headers=bearer(server))[0] == 200


def test_slow_clients_without_a_token_keep_nobody_out(server: TokenServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3 * BoundedServer.max_clients):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(b"GET /status HT")
        assert request(server, "/status", headers=bearer(server))[0] == 200


def test_a_request_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch, server: TokenServer) -> None:
    monkeypatch.setattr(token_server._Server, "admit_within_s", 0.3)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"GET /status HTTP/1.1\r\n")
        slow.settimeout(0.01)

        def is_disconnected() -> bool:
            try:
                slow.sendall(b"a")
                return slow.recv(1) == b""
            except socket.timeout:
                return False
            except OSError:
                return True

        assert wait_until(is_disconnected, 5)


def test_it_listens_on_loopback_only_and_frees_the_port() -> None:
    with TokenServer({}) as server:
        assert server._server.server_address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"--status-port {server.port}: .*choose another port"):
            TokenServer({}, server.port)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", server.port))


def test_the_token_file_is_private(server: TokenServer, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("an older, longer token" * 9)
    path.chmod(0o644)
    server.write_token(path)
    assert (stat.S_IMODE(path.stat().st_mode), read_token(path)) == (0o600, server.token)
    assert len(server.token) == 64


def test_a_browser_can_get_a_page_with_the_401_of_the_first_path() -> None:
    with TokenServer({"/status": json_response_of}, sign_in=b"<p>sign in</p>") as server:
        assert request(server, "/") == (401, "<p>sign in</p>")
        assert request(server, "/?token=0") == (401, "<p>sign in</p>")
        for path, method in (("/status", "GET"), ("/../", "GET"), ("/", "POST")):
            status, body = request(server, path, method)
            assert (status, "sign in" in body) == (401, False)
        assert request(server, "/", headers=bearer(server))[0] == 404
