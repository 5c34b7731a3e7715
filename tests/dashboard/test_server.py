from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Iterator, Tuple

import pytest
from bounded import wait_until
from dashboard.folders import Run

from raypod.__main__ import main
from raypod.dashboard import command
from raypod.dashboard.runs import RunsFolder
from raypod.status.token_server import TokenServer

PATHS = ["/", "/runs", "/run?name=a", "/../", "/a", "/a/metrics.jsonl", "/../../etc/passwd", "/%2e%2e/secret"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TokenServer]:
    Run(tmp_path / "runs" / "a").train(3)
    routes = command.routes(RunsFolder(tmp_path / "runs"))
    with TokenServer(routes, 0, "--port", command.asset("sign_in.html").encode()) as opened:
        yield opened


def get(server: TokenServer, path: str, method: str = "GET", signed: bool = True) -> Tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {server.token}"} if signed else {})
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


def get_json(server: TokenServer, path: str) -> Any:
    status, kind, body = get(server, path)
    assert (status, kind) == (200, "application/json; charset=utf-8")
    return json.loads(body)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_shown_without_the_token(server: TokenServer, tmp_path: Path, path: str) -> None:
    for method in ("GET", "POST"):
        status, _, body = get(server, path, method, signed=False)
        assert status == 401
        assert str(tmp_path) not in body
        assert '"a"' not in body
    wrong = path + ("&" if "?" in path else "?") + "token=" + "0" * 64
    assert get(server, wrong, signed=False)[0] == 401


def test_a_browser_without_the_token_gets_a_page_that_says_so(server: TokenServer) -> None:
    status, kind, body = get(server, "/", signed=False)
    assert (status, kind) == (401, "text/html; charset=utf-8")
    assert "open the address that" in body
    assert get(server, "/runs", signed=False)[1].startswith("application/json")


@pytest.mark.parametrize("path", ["/../", "/a", "/a/metrics.jsonl", "/../../etc/passwd", "/run?name=../secret", "/run"])
def test_other_paths_have_nothing(server: TokenServer, path: str) -> None:
    status, _, body = get(server, path)
    assert status == 404
    assert "loss" not in body


def test_it_is_read_only(server: TokenServer) -> None:
    assert {get(server, path, method)[0] for path in PATHS for method in ("POST", "PUT", "DELETE")} == {405}


def test_the_page_and_the_data(server: TokenServer, tmp_path: Path) -> None:
    status, kind, page = get(server, "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert 'id="runs-list"' in page
    assert "connect-src 'self'" in page
    assert len(page) < 5_000_000
    listed = get_json(server, "/runs")
    assert (listed["folder"], [run["name"] for run in listed["runs"]]) == (str(tmp_path / "runs"), ["a"])
    found = get_json(server, "/run?name=a&rows=1000000")
    assert (found["run"]["name"], len(found["run"]["curves"]["rows"])) == ("a", 3)
    again = get_json(server, f"/run?name=a&rows=x&version={found['version']}")
    assert again["version"].split(".")[0] == found["version"].split(".")[0]


def test_the_command_prints_one_line_and_ends_by_ctrl_c(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs, printed = tmp_path / "runs", tmp_path / "printed"
    Run(runs / "a").train(1)
    printed.touch()

    def steps() -> None:
        wait_until(lambda: printed.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=steps)
    thread.start()
    # capfd loses what is printed while another thread reads it.
    with printed.open("w", buffering=1) as file, contextlib.redirect_stdout(file):
        assert main(["dashboard", str(runs)]) == 0
    thread.join()
    pattern = rf"The dashboard of {runs}: http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{{64}}\n"
    assert re.fullmatch(pattern, printed.read_text())
    assert capfd.readouterr() == ("", "")


def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, message in (
            ([], "dashboard runs: the folder does not exist"),
            (["missing"], "dashboard missing: the folder does not exist"),
            (["file"], "dashboard file: is not a folder; give the folder that holds the runs"),
            ([".", "--port", "70000"], "--port 70000: must be a port number"),
            ([".", "--port", "x"], "--port x: must be a port number"),
            ([".", "--port", port], f"--port {port}: Address already in use; choose another port"),
            ([".", "--open"], "unknown flag --open"),
        ):
            assert main(["dashboard", *flags]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines()), message in err) == ("", 1, True), err
