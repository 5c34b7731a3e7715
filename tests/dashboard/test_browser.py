"""The dashboard in headless Chromium: live updates, a selection of two runs, the token and the address."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Tuple

import pytest
from browser import Browser, Page, find_chromium
from dashboard.folders import Run

from raypod.dashboard import command
from raypod.dashboard.runs import RunsFolder
from raypod.status.token_server import TokenServer

SELECTED = "raypodReport.runs.map((run) => run.name).sort().join()"
POINTS = "raypodReport.runs.length ? raypodReport.runs[0].curves.rows.length : 0"
LISTED = "[...document.querySelectorAll('#runs-list li')].map((item) => item.dataset.name)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with Browser(path) as found:
        yield found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Tuple[TokenServer, Path]]:
    """The dashboard of a run that is alive and of one that is done."""
    for name, state, exit_code in (("alive", "running", None), ("done", "done", 0)):
        run = Run(tmp_path / name)
        run.train(5)
        run.state(state, exit_code)
    routes = command.routes(RunsFolder(tmp_path))
    with TokenServer(routes, sign_in=command.asset("sign_in.html").encode()) as server:
        yield server, tmp_path


def click(tab: Page, name: str) -> None:
    tab.run(f"document.querySelector('#runs-list [data-name={name}] input').click()")


def open_signed(tab: Page, server: TokenServer, query: str = "") -> None:
    tab.open(f"{server.url}/?token={server.token}{query}")
    tab.wait_for("document.querySelectorAll('#runs-list li').length === 2")


def test_a_run_is_shown_live_compared_and_followed(browser: Browser, served: Tuple[TokenServer, Path]) -> None:
    server, folder = served
    with browser.page() as tab:
        open_signed(tab, server)
        tab.wait_for(f"{SELECTED} === 'alive' && {POINTS} === 5")
        live = Run.__new__(Run)
        live.path, live.updates = folder / "alive", 5
        live.train(7)
        tab.wait_for(f"{POINTS} === 12")
        tab.wait_for("document.querySelector('#runs-list [data-name=alive]').textContent.includes('12 of 1000')")
        tab.wait_for("raypodReport.charts.get('curve:loss').getOption().series[0].data.length === 12")

        click(tab, "done")
        tab.wait_for(f"{SELECTED} === 'alive,done'")
        assert tab.run("raypodReport.charts.get('curve:loss').getOption().series.length") >= 2
        tab.run("document.querySelector('#runs-follow input').click()")
        Run(folder / "new").train(1)
        tab.wait_for(f"{SELECTED} === 'alive,done,new' && {LISTED}.length === 3")

        tab.run("Object.assign(document.querySelector('#runs-filter input'), {value: 'DON'})")
        tab.run("document.querySelector('#runs-filter input').dispatchEvent(new Event('input'))")
        assert tab.run(LISTED) == ["done"]
        tab.run("document.querySelector('#runs-clear').click()")
        assert tab.run(f"{SELECTED} === '' && !document.querySelector('#runs-none').hidden")
        assert tab.errors == []


def test_the_token_leaves_the_address_and_a_reload_works(browser: Browser, served: Tuple[TokenServer, Path]) -> None:
    server, _ = served
    with browser.page() as tab:
        open_signed(tab, server, "&run=done&run=alive&run=missing")
        tab.wait_for(f"{SELECTED} === 'alive,done'")
        assert tab.run("location.href") == f"{server.url}/?run=done&run=alive"
        tab.open(f"{server.url}/?run=done&run=alive")  # 401, with the page that adds the token of the tab
        tab.wait_for("window.raypodReport && " + f"{SELECTED} === 'alive,done'")
        assert server.token not in tab.run("location.href")
        tab.open(f"{server.url}/?token=wrong")
        assert "needs a token" in tab.run("document.body.textContent")
        assert tab.run("sessionStorage.length") == 0
        tab.open(f"{server.url}/")
        assert "needs a token" in tab.run("document.body.textContent")


def test_it_fits_a_phone_and_shows_the_end_of_the_server(browser: Browser, served: Tuple[TokenServer, Path]) -> None:
    server, _ = served
    for width in (380, 1280):
        with browser.page(width) as tab:
            open_signed(tab, server)
            tab.wait_for(f"{POINTS} === 5")
            assert tab.run("document.documentElement.scrollWidth") <= width
            if width > 1200:
                server.close()
                tab.wait_for("document.querySelector('#runs-state').textContent.startsWith('No answer')", 60)
