"""The status endpoint: served while a training runs, listed for this user, and only for holders of the token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, Optional, Tuple

import pytest

import raypod
from raypod import train
from raypod.errors import ConfigError, RunError
from raypod.events import Event, UpdateDone
from raypod.observe.status import endpoint, token_server
from raypod.observe.status.endpoint import cached_route, served
from raypod.observe.status.prometheus import CONTENT_TYPE
from raypod.observe.status.token_server import Response, TokenServer, json_response, read_token
from raypod.plan import layout
from raypod.plan.layout import TOKEN_FILE
from raypod.runs import run_state
from raypod.runs.run_view import RunView
from raypod.system import signals
from raypod.system.bounded_server import BoundedServer
from tests.support.bounded import wait_until

INLINE = ["--fleet", "inline", "--device", "emulated"]
FLAGS: Dict[str, Any] = {"fleet": "inline", "device": "emulated", "num_instances": 1, "replicas": 1, "batch_size": 64}
FLAGS["lr_schedule"] = "constant"  # so that the number of updates may change


def get(port: int, path: str, token: str = "") -> Tuple[int, str, str]:
    """Return the status code, the content type and the body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()
    finally:
        connection.close()


def free_port() -> int:
    with TokenServer({}) as server:
        return server.port


def port_of(folder: Path) -> int:
    state = run_state.read(folder)
    assert state.status_port is not None
    return state.status_port


def content_of(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_training_serves_its_state_and_resumes_with_another_port(tmp_path: Path, capfd: Any) -> None:
    folder, chosen, seen = tmp_path / "run", free_port(), []  # type: ignore[var-annotated]

    def look(event: Event) -> None:
        if isinstance(event, UpdateDone):
            port, token = port_of(folder), read_token(folder / TOKEN_FILE)
            assert stat.S_IMODE((folder / TOKEN_FILE).stat().st_mode) == 0o600
            assert [get(port, path)[0] for path in ("/", "/status", "/metrics", "/../")] == [401] * 4
            code, content_type, text = get(port, "/metrics", token)
            seen.append((port, get(port, "/status", token)[0], code, content_type, text))

    raypod.fit(run_dir=folder, updates=2, status_port=chosen, callbacks=look, **FLAGS)
    assert [each[:4] for each in seen] == [(chosen, 200, 200, CONTENT_TYPE)] * 2
    assert 'raypod_updates_total{run="run"} 1\n' in seen[0][4]
    assert_closed(folder, chosen)
    before = content_of(folder)
    resumed = [*f"--num-instances 1 --replicas 1 --batch-size 64 --resume {folder} --updates 3".split(), *INLINE]
    with TokenServer({}) as other:
        for more in ([], ["--detach"]):
            capfd.readouterr()
            assert train.main([*resumed, "--status-port", str(other.port), *more]) == 2
            out, err = capfd.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert f"--status-port {other.port}: Address already in use; choose another port" in err
            assert content_of(folder) == before
    seen.clear()
    raypod.fit(run_dir=folder, resume=folder, updates=3, status_port=free_port(), callbacks=look, **FLAGS)
    assert len(seen) == 1
    assert 'raypod_updates_total{run="run"} 1\n' in seen[0][4]
    assert 'raypod_update{run="run"} 3\n' in seen[0][4]
    assert_closed(folder, seen[0][0])


def assert_closed(folder: Path, port: int) -> None:
    state = json.loads((folder / layout.STATE).read_text())
    assert (state["status_port"], state["status_token_file"]) == (None, None)
    assert not (folder / TOKEN_FILE).exists()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/status")


def test_a_port_in_use_or_a_wrong_one_leaves_no_folder(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenServer({}) as other:
        for more in ([f"--status-port={other.port}"], [f"--status-port={other.port}", "--detach"]):
            assert train.main([*INLINE, *more]) == 2
            out, err = capfd.readouterr()
            assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
            assert "--status-port" in err
        assert train.main([*INLINE, f"--status-port={other.port}", "--dry-run"]) == 0  # the plan does not depend on it
        capfd.readouterr()
    for port in ("-1", "65536", "x"):
        assert train.main([f"--status-port={port}", "--dry-run"]) == 2
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_token_is_removed_by_an_exception_and_by_an_abort(make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    state = run_state.StateFile(tmp_path, RunView(make()))

    def fail() -> None:
        with state, served({}, tmp_path, 0, state):
            assert (tmp_path / TOKEN_FILE).exists()
            raise RunError("it broke")

    with pytest.raises(RunError, match="it broke"):
        fail()
    assert not (tmp_path / TOKEN_FILE).exists()

    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        raise Exited

    monkeypatch.setattr(signals.os, "_exit", leave)
    state = run_state.StateFile(tmp_path, RunView(make()))
    with state, served({}, tmp_path, 0, state):
        with pytest.raises(Exited):
            signals.abort(ConfigError("Ray hangs"))
        assert not (tmp_path / TOKEN_FILE).exists()
        assert json.loads((tmp_path / layout.STATE).read_text())["status_port"] is None


@pytest.mark.parametrize(("cpu_s", "kept_s"), [(0.0001, 0.5), (0.001, 1.0), (0.1, 2.0)])
def test_responses_take_at_most_a_thousandth_of_a_core(cpu_s: float, kept_s: float, monkeypatch: Any) -> None:
    now_s = {"monotonic": 100.0, "thread_time": 0.0}
    clocks = SimpleNamespace(monotonic=lambda: now_s["monotonic"], thread_time=lambda: now_s["thread_time"])
    monkeypatch.setattr(endpoint, "time", clocks)
    computed = []

    def respond() -> Response:
        now_s["thread_time"] += cpu_s
        computed.append(now_s["monotonic"])
        return Response(b"")

    route = cached_route(respond)
    while now_s["monotonic"] < 110.0:
        route({})
        now_s["monotonic"] += 0.01
    assert computed[1] - computed[0] == pytest.approx(kept_s, abs=0.03)
    assert len(computed) == pytest.approx(10 / kept_s, abs=1)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "registry"
    monkeypatch.setenv(endpoint.VARIABLE, str(path))
    return path


def test_an_endpoint_is_listed_while_its_process_serves_it(registry: Path) -> None:
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert (stat.S_IMODE(registry.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
        (found,) = endpoint.entries()
        assert (found.run_dir, found.port, found.token) == ("/runs/a", 4711, "secret")
        assert (found.pid, found.uid) == (os.getpid(), os.getuid())
        assert "secret" not in repr(found)
    assert (endpoint.entries(), list(registry.iterdir())) == ([], [])
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert path is not None
        changed(path, added_later=[1])
        assert [each.port for each in endpoint.entries()] == [4711]
        content = path.read_text()
        reused = {"started_ticks": 1}  # the pid belongs to another process now
        for values in (reused, {"pid": 2**22 + 1}, {"pid": None}, {"namespaces": ["pid:[1]", "net:[1]"]}):
            changed(path, **values)
            assert endpoint.entries() == []
            path.write_text(content)
    with endpoint.registered(Path("/runs/a"), 1, "secret") as killed, endpoint.registered(Path("/b"), 2, "s") as other:
        assert killed is not None
        assert other is not None
        changed(killed, started_ticks=1)
        changed(other, started_ticks=1, namespaces=["elsewhere"])
        with endpoint.registered(Path("/runs/c"), 3, "secret"):
            assert not killed.exists()
            assert other.exists()
            assert [each.port for each in endpoint.entries()] == [3]


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_run_is_listed_by_its_path_without_links(registry: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with endpoint.registered(tmp_path / "link", 4711, "secret"):
        (entry,) = endpoint.entries()
    assert entry.run_dir == str(tmp_path.resolve() / "run")


def test_a_folder_that_others_can_read_gets_no_token(registry: Path) -> None:
    registry.mkdir(mode=0o755)
    registry.chmod(0o755)
    with endpoint.registered(Path("/runs/a"), 4711, "secret") as path:
        assert path is None
        assert endpoint.entries() == []
    assert list(registry.iterdir()) == []


def test_damaged_entries_are_ignored(registry: Path) -> None:
    registry.mkdir(mode=0o700)
    (registry / "2-2.json").symlink_to("/etc/passwd")
    os.mkfifo(registry / "3-3.json")
    for content in ("", "[]", "{}", "{", json.dumps({"pid": os.getpid()})):
        (registry / "1-1.json").write_text(content)
        assert endpoint.entries() == []


def test_a_folder_named_after_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(endpoint.VARIABLE)
    monkeypatch.setattr(endpoint, "_PARENT", tmp_path)
    with endpoint.registered(Path("/runs/a"), 4711, "secret"):
        assert [each.port for each in endpoint.entries()] == [4711]
        (tmp_path / f"raypod-{os.getuid()}").rename(tmp_path / f"raypod-{os.getuid() + 1}")
        assert endpoint.entries() == []
        (tmp_path / f"raypod-{os.getuid() + 1}").rename(tmp_path / f"raypod-{os.getuid()}")


@pytest.fixture
def server() -> Iterator[TokenServer]:
    with TokenServer({"/status": json_response_of, "/broken": broken}) as opened:
        yield opened


def json_response_of(query: Any) -> Any:
    return json_response({"query": query, "loss": float("nan")})


def broken(query: Any) -> Any:
    raise ValueError("no state")


def request(server: TokenServer, path: str, method: str = "GET", headers: Optional[Dict[str, str]] = None) -> Any:
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


def test_a_client_with_the_private_token_gets_what_the_routes_give(server: TokenServer, tmp_path: Path) -> None:
    assert request(server, "/status?a=1", headers=bearer(server)) == (200, '{"query": {"a": "1"}, "loss": null}')
    assert request(server, f"/status?token={server.token}") == (200, '{"query": {}, "loss": null}')
    for path in ("/../", "/../../etc/passwd", "/nothing", "/status/"):
        status, body = request(server, path, headers=bearer(server))
        assert (status, "no such path" in body) == (404, True)
    assert request(server, "/broken", headers=bearer(server)) == (500, '{"error": "ValueError: no state"}')
    assert request(server, "/status", headers={**bearer(server), "Host": "evil.example"})[0] == 403
    with socket.create_connection(("127.0.0.1", server.port)):
        assert request(server, "/status", headers=bearer(server))[0] == 200
    with contextlib.ExitStack() as stack:
        for _ in range(3 * BoundedServer.max_clients):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            slow.sendall(b"GET /status HT")
        assert request(server, "/status", headers=bearer(server))[0] == 200
    path = tmp_path / "token"
    path.write_text("an older, longer token" * 9)
    path.chmod(0o644)
    server.write_token(path)
    assert (stat.S_IMODE(path.stat().st_mode), read_token(path)) == (0o600, server.token)
    assert len(server.token) == 64


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


def test_a_browser_can_get_a_page_with_the_401_of_the_first_path() -> None:
    with TokenServer({"/status": json_response_of}, sign_in=b"<p>sign in</p>") as server:
        assert request(server, "/") == (401, "<p>sign in</p>")
        assert request(server, "/?token=0") == (401, "<p>sign in</p>")
        for path, method in (("/status", "GET"), ("/../", "GET"), ("/", "POST")):
            status, body = request(server, path, method)
            assert (status, "sign in" in body) == (401, False)
        assert request(server, "/", headers=bearer(server))[0] == 404
