"""The dashboard over HTTP and in Chromium, its command, and the list of runs in a folder."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from raypod.__main__ import main
from raypod.observe.dashboard import command
from raypod.observe.dashboard import command as module
from raypod.observe.dashboard.command import RunsFolder
from raypod.observe.status.token_server import TokenServer
from tests.support.bounded import wait_until
from tests.support.browser import Page
from tests.support.dashboard_folders import Run


@pytest.fixture
def live(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "a", 3)


@pytest.fixture
def server(live: Run) -> Iterator[TokenServer]:
    routes = command.routes(RunsFolder(live.path.parent))
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


def test_other_requests_get_nothing(server: TokenServer) -> None:
    """`tests/observe/status/test_endpoint.py` tests all paths and methods."""
    status, kind, body = get(server, "/", signed=False)
    assert (status, kind) == (401, "text/html; charset=utf-8")
    assert "open the address that" in body
    for path in ("/a", "/a/metrics.jsonl", "/../../etc/passwd", "/%2e%2e/secret", "/run?name=../secret", "/run"):
        answers = [get(server, path), get(server, path, signed=False), get(server, path, "POST")]
        assert [answer[0] for answer in answers] == [404, 401, 405]


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


def test_the_command_prints_one_line_and_ends_by_ctrl_c(live: Run, tmp_path: Path, capfd: Any) -> None:
    runs, printed = live.path.parent, tmp_path / "printed"
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


SELECTED = "raypodReport.runs.map((run) => run.name).sort().join()"
POINTS = "raypodReport.runs.length ? raypodReport.runs[0].curves.rows.length : 0"
LISTED = "[...document.querySelectorAll('#runs-list li')].map((item) => item.dataset.name)"


@pytest.fixture
def done(live: Run) -> Run:
    run = Run(live.path.with_name("done"), 3)
    run.state("done", 0)
    return run


def open_signed(tab: Page, server: TokenServer, query: str = "") -> None:
    tab.open(f"{server.url}/?token={server.token}{query}")
    tab.wait_for("document.querySelectorAll('#runs-list li').length === 2")


def test_a_run_is_shown_live_compared_and_followed(chromium: Any, server: TokenServer, live: Run, done: Run) -> None:
    with chromium.page() as tab:
        open_signed(tab, server)
        tab.wait_for(f"{SELECTED} === 'a' && {POINTS} === 3")
        live.train(9)
        tab.wait_for(f"{POINTS} === 12")
        tab.wait_for("document.querySelector('#runs-list [data-name=a]').textContent.includes('12 of 1000')")
        tab.wait_for("raypodReport.charts.get('curve:loss').getOption().series[0].data.length === 12")
        tab.run("document.querySelector('#runs-list [data-name=done] input').click()")
        tab.wait_for(f"{SELECTED} === 'a,done'")
        assert tab.run("raypodReport.charts.get('curve:loss').getOption().series.length") >= 2
        tab.run("document.querySelector('#runs-follow input').click()")
        Run(live.path.with_name("new"), 1)
        tab.wait_for(f"{SELECTED} === 'a,done,new' && {LISTED}.length === 3")
        tab.run("Object.assign(document.querySelector('#runs-filter input'), {value: 'DON'})")
        tab.run("document.querySelector('#runs-filter input').dispatchEvent(new Event('input'))")
        assert tab.run(LISTED) == ["done"]
        tab.run("document.querySelector('#runs-clear').click()")
        assert tab.run(f"{SELECTED} === '' && !document.querySelector('#runs-none').hidden")
        assert tab.errors == []


def test_the_list_is_sorted_by_column_heads_and_filtered(chromium: Any, server: TokenServer, live: Run) -> None:
    for name, updates, state in (("b2", 8, "done"), ("b10", 5, "failed"), ("new", 0, "done")):
        Run(live.path.with_name(name), updates).state(state, 0)
    with chromium.page() as tab:
        tab.open(f"{server.url}/?token={server.token}")
        tab.wait_for(f"{LISTED}.length === 4")
        before = tab.run(LISTED)

        def click(column: str) -> Any:
            tab.run(f"document.querySelector('#runs-sort [data-column={column}]').click()")
            return tab.run(LISTED)

        def kept(words: str) -> Any:
            tab.run(f"Object.assign(document.querySelector('#runs-filter input'), {{value: {json.dumps(words)}}})")
            tab.run("document.querySelector('#runs-filter input').dispatchEvent(new Event('input'))")
            return tab.run(LISTED)

        assert click("name") == ["a", "b2", "b10", "new"]
        assert click("name") == ["new", "b10", "b2", "a"]
        assert click("name") == before
        assert click("loss") == ["b2", "b10", "a", "new"]  # 1/8, 1/5, 1/3, unknown
        assert click("loss") == ["a", "b10", "b2", "new"]
        tab.run("window.raypodDashboard.poll()")
        assert kept("loss<0.3") == ["b10", "b2"]
        assert kept("b update>=5 loss>=0.2") == ["b10"]
        assert kept("state>3") == []
        assert kept("FAIL") == ["b10"]
        assert tab.errors == []
        tab.open(f"{server.url}/")
        tab.wait_for(f"window.raypodReport && {LISTED}.join() === 'a,b10,b2,new'")  # a reload keeps the order


def test_the_token_leaves_the_address_and_a_reload_works(chromium: Any, server: TokenServer, done: Run) -> None:
    with chromium.page() as tab:
        open_signed(tab, server, "&run=done&run=a&run=missing")
        tab.wait_for(f"{SELECTED} === 'a,done'")
        assert tab.run("location.href") == f"{server.url}/?run=done&run=a"
        tab.open(f"{server.url}/?run=done&run=a")  # 401, with the page that adds the token of the tab
        tab.wait_for("window.raypodReport && " + f"{SELECTED} === 'a,done'")
        assert server.token not in tab.run("location.href")
        tab.open(f"{server.url}/?token=wrong")
        assert "needs a token" in tab.run("document.body.textContent")
        assert tab.run("sessionStorage.length") == 0
        tab.open(f"{server.url}/")
        assert "needs a token" in tab.run("document.body.textContent")


def test_it_fits_a_phone_and_shows_the_end_of_the_server(chromium: Any, server: TokenServer, done: Run) -> None:
    with chromium.page() as tab:
        for width in (380, 1280):
            tab.resize(width, 900)
            open_signed(tab, server)
            tab.wait_for(f"{POINTS} === 3")
            assert tab.run("document.documentElement.scrollWidth") <= width
        server.close()
        tab.wait_for("document.querySelector('#runs-state').textContent.startsWith('No answer')", 60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four runs, and things that are no runs."""
    found = tmp_path / "runs"
    Run(found / "old", 1).state("failed", exit_code=1)
    Run(found / "done", 3).state("done", exit_code=0)
    Run(found / "alive", 2)
    Run(found / "killed").state("running", ticks=1)
    Run(tmp_path / "secret", 1)
    (found / "empty").mkdir()
    (found / "file").write_text("")
    return found


def states(runs: RunsFolder) -> Dict[str, str]:
    return {run["name"]: run["state"] for run in runs.list()}


def test_the_list_begins_with_what_is_alive_then_with_the_newest_and_follows_changes(folder: Path) -> None:
    runs = RunsFolder(folder)
    expected = [("alive", "running"), ("done", "done"), ("old", "failed"), ("killed", "died")]
    assert list(states(runs).items()) == expected
    first = runs.list()[0]
    assert {**first, "loss": 0.5, "restarts": 1, "total_updates": 1000, "samples_per_s": 80.0} == first
    Run(folder / "new", 5)
    (folder / "old" / "state.json").unlink()
    shutil.rmtree(str(folder / "done"))
    assert states(runs) == {"new": "running", "alive": "running", "killed": "died", "old": "unknown"}


def test_unchanged_runs_are_not_read_again_and_few_are_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, read, names = RunsFolder(folder), module.run_state.read, []  # type: ignore[var-annotated]
    monkeypatch.setattr(module.run_state, "read", lambda path: names.append(path.name) or read(path))
    for _ in range(2):
        runs.list()
        assert [name for name in names if name in ("done", "old")] == ["done", "old"]
    monkeypatch.setattr(module, "_MAX_READERS", 2)
    runs = RunsFolder(folder)
    for name in ("done", "old", "done", "alive"):
        assert runs.data(name, 100, "") is not None
    assert list(runs._readers) == ["done", "alive"]
    runs = RunsFolder(folder / "done")
    assert states(runs) == {"done": "done"}
    assert runs.data("done", 100, "") is not None


def test_links_and_pipes_are_not_followed_and_a_name_is_no_path(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (folder / "linked").symlink_to(secret, target_is_directory=True)
    for name in ("metrics.jsonl", "state.json", "config.yaml"):
        file = Run(folder / f"with-{name}").path / name
        if file.exists():
            file.unlink()
        file.symlink_to(secret / "metrics.jsonl")
    os.mkfifo(Run(folder / "with-pipe").path / "events.jsonl")
    runs = RunsFolder(folder)
    assert set(states(runs)) == {"alive", "done", "old", "killed"}
    names = ["linked", "with-metrics.jsonl", "with-pipe", "", ".", "..", "../secret", str(secret), "done/", "\0"]
    names += ["done/../old", "empty", "file"]
    assert [name for name in names if runs.data(name, 100, "") is not None] == []
    assert runs.data("alive", 100, "") is not None
    (folder / "alive" / "events.jsonl").symlink_to(secret / "metrics.jsonl")
    assert runs.data("alive", 100, "") is None


def losses(data: Any) -> List[float]:
    return [row[data["curves"]["columns"].index("loss")] for row in data["curves"]["rows"]]


def test_data_has_a_version_and_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOVING_S", 1e12)
    run = Run(tmp_path / "runs" / "a", 2)
    runs: Any = RunsFolder(tmp_path / "runs")
    first = runs.data("a", 100, "")
    assert losses(first.data) == [1.0, 0.5]
    assert runs.data("a", 100, first.word) == (first.word, None)
    run.train(2)
    second = runs.data("a", 100, first.word)
    assert (len(losses(second.data)), second.data["state"]) == (4, "running")
    run.state("done", exit_code=0)
    third = runs.data("a", 100, second.word)
    assert third.data["state"] == "done"
    assert RunsFolder(tmp_path / "runs").data("a", 100, third.word) != third  # the versions of another server differ
