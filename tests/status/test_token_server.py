from __future__ import annotations

import http.client
import socket
import stat
from pathlib import Path
from typing import Dict, Iterator, Optional, Tuple

import pytest

from raypod.errors import ConfigError
from raypod.status.token_server import TokenServer, json_response, read_token


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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_every_path_needs_the_token(server: TokenServer, path: str, method: str) -> None:
    assert request(server, path, method)[0] == 401
    assert request(server, path, method, {"Authorization": "Bearer " + "0" * 64})[0] == 401
    assert request(server, f"{path}{'&' if '?' in path else '?'}token=", method)[0] == 401


def test_the_token_is_accepted_as_header_and_as_parameter(server: TokenServer) -> None:
    assert request(server, "/status?a=1", headers=bearer(server)) == (200, '{"query": {"a": "1"}, "loss": null}')
    assert request(server, f"/status?token={server.token}") == (200, '{"query": {}, "loss": null}')


@pytest.mark.parametrize("path", ["/../", "/../../etc/passwd", "/nothing", "/status/"])
def test_unknown_paths_contain_nothing(server: TokenServer, path: str) -> None:
    status, body = request(server, path, headers=bearer(server))
    assert (status, "no such path" in body) == (404, True)


def test_it_is_read_only_and_reports_errors_of_routes(server: TokenServer) -> None:
    assert request(server, "/status", "POST", bearer(server))[0] == 405
    assert request(server, "/broken", headers=bearer(server)) == (500, '{"error": "ValueError: no state"}')


@pytest.mark.parametrize("method", ["POST", "TRACE", "PROPFIND"])
def test_every_method_needs_the_token_first(server: TokenServer, method: str) -> None:
    assert request(server, "/status", method)[0] == 401
    assert request(server, "/status", method, bearer(server))[0] == 405


def test_another_host_name_is_refused(server: TokenServer) -> None:
    assert request(server, "/status", headers={**bearer(server), "Host": "evil.example"})[0] == 403


def test_a_client_that_sends_nothing_does_not_stop_others(server: TokenServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert request(server, "/status", headers=bearer(server))[0] == 200


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
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_token(path) == server.token
    assert len(server.token) == 64


def test_a_browser_can_get_a_page_with_the_401_of_the_first_path() -> None:
    with TokenServer({"/status": json_response_of}, sign_in=b"<p>sign in</p>") as server:
        assert request(server, "/") == (401, "<p>sign in</p>")
        assert request(server, "/?token=0") == (401, "<p>sign in</p>")
        for path, method in (("/status", "GET"), ("/../", "GET"), ("/", "POST")):
            status, body = request(server, path, method)
            assert (status, "sign in" in body) == (401, False)
        assert request(server, "/", headers=bearer(server))[0] == 404
