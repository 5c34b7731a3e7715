"""The status endpoint of a training: served while it runs, for holders of the token, and gone after every end."""

from __future__ import annotations

import http.client
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Tuple

import pytest

import raypod
from raypod import train
from raypod.errors import ConfigError, RunError
from raypod.events import Event, UpdateDone
from raypod.observe.status import endpoint
from raypod.observe.status.endpoint import cached_route, served
from raypod.observe.status.prometheus import CONTENT_TYPE
from raypod.observe.status.token_server import Response, TokenServer, read_token
from raypod.plan import layout
from raypod.plan.layout import TOKEN_FILE
from raypod.runs import run_state
from raypod.runs.run_view import RunView
from raypod.system import signals

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
    assert state is not None
    assert state.status_port is not None
    return state.status_port


def content_of(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_training_serves_its_state_while_it_runs_and_resumes_with_another_port(tmp_path: Path, capfd: Any) -> None:
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


def test_a_port_in_use_or_a_wrong_one_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
def test_a_response_is_computed_so_rarely_that_it_takes_a_thousandth_of_a_core(
    cpu_s: float, kept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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
