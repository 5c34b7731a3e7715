"""The page: escaped data, bounded size, the command; in headless Chromium what is drawn, zoomed, printed, updated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from browser import Browser, Page, find_chromium
from run_folders import update_record, write_lines, write_run

from raypod import __main__
from raypod.report import page
from raypod.report.run_data import RunReader

UNTRUSTED = "</script><script>document.title = 'changed'</script><img src=x onerror=alert(1)>"
SERIES = "raypodReport.charts.get({key}).getOption().series.map((each) => ({{id: each.id, data: each.data}}))"


def data_of(folder: Path) -> Dict[str, Any]:
    reader = RunReader(folder)
    reader.refresh()
    return reader.data()


def embedded(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="raypod-data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    data = {**data_of(tmp_path / "run"), "name": UNTRUSTED, "message": "a & b \u2028"}
    text = page.render([data], title=UNTRUSTED)
    assert UNTRUSTED not in text
    assert embedded(text) == [data]
    assert text.count("</script>") == 3
    assert "http-equiv" in text
    assert "unsafe-eval" not in text


def test_the_curves_of_many_runs_have_fewer_rows() -> None:
    run = {"rows": ["x" * 1000] * 4000}
    counts: List[int] = []

    def data(max_rows: int) -> Dict[str, Any]:
        counts.append(max_rows)
        return {"rows": run["rows"][:max_rows]}

    assert len(page.render_bounded([data] * 4).encode()) < page.MAX_BYTES
    assert counts[-1] < 4000


def test_all_parts_are_in_the_package() -> None:
    assets = Path(page.__file__).parent / "assets"
    names = {path.name for path in assets.iterdir()}
    assert {*page.asset_names(), "echarts-LICENSE", "echarts-NOTICE", "echarts-LICENSE-d3"} == names


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["report", "one"]) == 0
    assert __main__.main(["report", "one", "two", "one/"]) == 0
    assert __main__.main(["report", "two", "--output", "other.html"]) == 0
    assert [each["name"] for each in embedded(Path("one/report.html").read_text())] == ["one"]
    assert [each["name"] for each in embedded(Path("report.html").read_text())] == ["one", "two"]
    assert [each["name"] for each in embedded(Path("other.html").read_text())] == ["two"]
    assert not Path("two/report.html").exists()
    assert capsys.readouterr().out.splitlines()[0].startswith(f"Report: {tmp_path / 'one' / 'report.html'}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing"], "missing does not exist"),
        (["."], "is no run folder"),
        ([], "the following arguments are required"),
        (["one", "--output", "."], "is a folder"),
        (["one", "--output", ""], "--output is empty; name a file"),
        (["one", "--output", "none/report.html"], "cannot write none/report.html"),
    ],
)
def test_a_wrong_command_is_one_line(
    tmp_path: Path, monkeypatch: Any, capsys: Any, words: List[str], message: str
) -> None:
    write_run(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["report", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.glob("**/*.html*"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with Browser(path) as found:
        yield found


def opened(tab: Page, runs: List[Dict[str, Any]], folder: Path, **options: Any) -> None:
    file = folder / "page.html"
    file.write_text(page.render(runs, **options))
    tab.open(file.as_uri())
    tab.wait_for("window.raypodReport && raypodReport.ready")


def test_curves_have_the_points_of_the_metrics(tmp_path: Path, browser: Browser) -> None:
    lines = write_run(tmp_path / "run")
    with browser.page() as tab:
        opened(tab, [data_of(tmp_path / "run")], tmp_path)
        training, evaluation = tab.run(SERIES.format(key="'curve:loss'"))
        assert training["data"] == [[line["update"], line["loss"]] for line in lines]
        assert evaluation["data"] == [[20, 0.5], [40, 0.5]]
        for value, column in (("samples", "samples"), ("time", "time_s")):
            tab.run(f"document.querySelector('[data-value={value}]').click()")
            assert [x for x, _ in tab.run(SERIES.format(key="'curve:loss'"))[0]["data"]] == [
                pytest.approx(line[column]) for line in lines
            ]
        assert tab.run("document.querySelectorAll('#curves svg path').length") > 4
        tiles = tab.run("[...document.querySelectorAll('.tiles dt')].map((each) => each.innerText)")
        assert {"loss, last update", "loss, evaluation"} <= set(tiles)
        assert tab.run("document.querySelector('#instances').innerText").count("slow") >= 2
        assert tab.errors == []
        assert tab.requests == [(tmp_path / "page.html").as_uri()]


def test_a_run_without_a_summary_names_its_last_checkpoint(tmp_path: Path, browser: Browser) -> None:
    write_run(tmp_path / "run")
    with browser.page() as tab:
        opened(tab, [{**data_of(tmp_path / "run"), "summary": None}], tmp_path)
        rows = "[...document.querySelectorAll('#environment tr')].map((row) => row.innerText)"
        assert any(row.split() == ["last", "checkpoint", "update-00000020"] for row in tab.run(rows))
        assert tab.errors == []


def test_untrusted_text_is_shown_and_not_run(tmp_path: Path, browser: Browser) -> None:
    write_run(tmp_path / "run")
    data = {**data_of(tmp_path / "run"), "name": UNTRUSTED, "message": UNTRUSTED}
    data["config"] = {f"training.{UNTRUSTED}": UNTRUSTED}
    with browser.page() as tab:
        opened(tab, [data, {**data, "id": "/other", "name": "other", "config": {}}], tmp_path)
        assert tab.run("document.title") == "raypod report"
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert UNTRUSTED in tab.run("document.querySelector('#settings').textContent")
        tab.run("raypodReport.charts.get('curve:loss').dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: 5})")
        assert UNTRUSTED in tab.wait_for("document.querySelector('[data-key=\"curve:loss\"] .chart').textContent")
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert tab.errors == []


@pytest.mark.parametrize("width", [380, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_the_window(tmp_path: Path, browser: Browser, width: int, dark: bool) -> None:
    for number in (1, 2):
        write_run(tmp_path / f"a-run-with-quite-a-long-name-{number}", learning_rate=number / 10, instances=8)
    runs = [data_of(folder) for folder in sorted(tmp_path.iterdir())]
    runs[0]["message"] = "instance 3 on host-b: " + "x" * 200
    is_outside = (
        "each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('svg') && !each.closest('.scroll')"
    )
    elements = f"[...document.querySelectorAll('#report *')].filter((each) => {is_outside})"
    overflowing = f"{elements}.map((each) => each.outerHTML.slice(0, 90))"
    with browser.page(width=width, dark=dark) as tab:
        opened(tab, runs, tmp_path)
        assert tab.run(overflowing) == []
        assert tab.run("document.documentElement.scrollWidth") == width
        assert tab.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert tab.run("[...raypodReport.charts.values()].every((chart) => chart.getWidth() > 250)")
        assert tab.errors == []


def test_new_data_keeps_the_zoom_and_the_folded_parts(tmp_path: Path, browser: Browser) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    zoom = "((z) => [z.startValue, z.endValue])(raypodReport.charts.get('curve:{}').getOption().dataZoom[0])"
    with browser.page() as tab:
        opened(tab, [data_of(tmp_path / "a"), data_of(tmp_path / "b")], tmp_path)
        tab.run(
            "raypodReport.charts.get('curve:loss').dispatchAction({type: 'dataZoom', startValue: 10, endValue: 30})"
        )
        assert tab.run(zoom.format("accuracy")) == [10, 30]
        tab.run("document.querySelector('#plan details').open = false")
        with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(update_record(61, 0.25)) + "\n")
        runs = [data_of(tmp_path / "a"), data_of(tmp_path / "b")]
        tab.run(f"raypodReport.update({json.dumps(runs)})")
        assert tab.run(SERIES.format(key="'curve:loss'"))[0]["data"][-1] == [61, 0.25]
        assert (tab.run(zoom.format("loss")), tab.run(zoom.format("accuracy"))) == ([10, 30], [10, 30])
        assert tab.run("document.querySelector('#plan details').open") is False
        tab.run("document.querySelector('#reset-zoom').click()")
        assert tab.run(zoom.format("loss")) == [1, 61]
        tab.run("raypodReport.update([])")
        assert "No run is selected" in tab.run("document.querySelector('#overview').innerText")
        tab.run(f"raypodReport.update({json.dumps(runs[1:])})")
        assert tab.run("document.querySelector('h1').textContent") == "b"
        assert tab.errors == []


def test_a_report_of_100_000_updates_is_small_and_opens(tmp_path: Path, browser: Browser) -> None:
    lines = write_run(tmp_path / "run", updates=100_000, instances=16)
    reader = RunReader(tmp_path / "run")
    reader.refresh()
    text = page.render_bounded([reader.data])
    assert len(text.encode()) < 5_000_000
    (tmp_path / "page.html").write_text(text)
    with browser.page() as tab:
        tab.open((tmp_path / "page.html").as_uri())
        tab.wait_for("window.raypodReport && raypodReport.ready")
        values = [y for _, y in tab.run(SERIES.format(key="'curve:loss'"))[0]["data"]]
        assert len(values) < 5000
        assert (max(values), min(values)) == (max(each["loss"] for each in lines), min(each["loss"] for each in lines))
        assert tab.errors == []


def test_a_printed_report_is_light_and_complete(tmp_path: Path, browser: Browser) -> None:
    for number in range(5):
        write_run(tmp_path / f"run-{number}")
    with browser.page(dark=True) as tab:
        opened(tab, [data_of(folder) for folder in sorted(tmp_path.iterdir())], tmp_path)
        facts = "[document.documentElement.dataset.theme, document.querySelectorAll('details:not([open])').length]"
        tab.run(f"addEventListener('beforeprint', () => {{ window.printed = {facts}; }})")
        assert len(tab.pdf()) > 50_000
        assert tab.run("window.printed") == ["light", 0]
        assert tab.run("document.documentElement.dataset.theme") == "dark"
        assert tab.run("document.querySelectorAll('details:not([open])').length") > 0
        assert tab.errors == []


def test_a_run_without_files_but_its_state_is_drawn(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "metrics.jsonl", [])
    with browser.page() as tab:
        opened(tab, [data_of(tmp_path / "run")], tmp_path)
        assert "No update is done yet" in tab.run("document.querySelector('#curves').innerText")
        assert tab.errors == []
