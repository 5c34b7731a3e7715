"""The page: escaped data, bounded size, the command; in headless Chromium what is drawn, zoomed, printed, updated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from raypod import __main__
from raypod.observe.report import page
from raypod.observe.report.run_data import RunReader
from tests.support.browser import Page
from tests.support.run_folders import update_record, write_lines, write_run

UNTRUSTED = "</script><script>document.title = 'changed'</script><img src=x onerror=alert(1)>"
LOSS = "raypodReport.charts.get('curve:loss')"
SERIES = f"{LOSS}.getOption().series.map((each) => ({{id: each.id, data: each.data}}))"
THEME = "document.documentElement.dataset.theme"


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
    assert (embedded(text), text.count("</script>")) == ([data], 3)
    assert "http-equiv" in text
    assert "unsafe-eval" not in text


def test_names_that_are_not_utf8_and_another_locale(tmp_path: Path, processes: None) -> None:
    run = tmp_path / "caf\udce9"
    write_run(run)
    assert "caf\\xe9" in page.render([data_of(run)], title=run.name).encode().decode()
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "raypod", "report", os.fsencode(run), "--output", str(tmp_path / "page.html")]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_curves_of_many_runs_have_fewer_rows() -> None:
    counts: List[int] = []

    def data(max_rows: int) -> Dict[str, Any]:
        counts.append(max_rows)
        return {"rows": ["x" * 1000] * min(max_rows, 4000)}

    assert len(page.render_bounded([data] * 4).encode()) < page.MAX_BYTES
    assert counts[-1] < 4000
    assets = Path(page.__file__).parent / "assets"
    names = {path.name for path in assets.iterdir()}
    drawing = {"echarts.min.js", "page.css", *page._SCRIPTS}
    assert {*drawing, "echarts-LICENSE", "echarts-NOTICE", "echarts-LICENSE-d3"} == names


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


@pytest.fixture
def tab(chromium: Any, request: Any) -> Iterator[Page]:
    """A page of the size and scheme that the test has as a parameter; it must have no errors at its end."""
    with chromium.page(**getattr(request, "param", {})) as found:
        yield found
        assert found.errors == []


def opened(tab: Page, text: str, folder: Path) -> None:
    (folder / "page.html").write_text(text)
    tab.open((folder / "page.html").as_uri())
    tab.wait_for("window.raypodReport && raypodReport.ready")


def test_curves_have_the_points_of_the_metrics_and_runs_with_few_files_are_drawn(tmp_path: Path, tab: Page) -> None:
    lines = write_run(tmp_path / "run")
    opened(tab, page.render([data_of(tmp_path / "run")]), tmp_path)
    training, evaluation = tab.run(SERIES)
    assert training["data"] == [[line["update"], line["loss"]] for line in lines]
    assert evaluation["data"] == [[20, 0.5], [40, 0.5]]
    for value, column in (("samples", "samples"), ("time", "time_s")):
        tab.run(f"document.querySelector('[data-value={value}]').click()")
        assert [x for x, _ in tab.run(SERIES)[0]["data"]] == [pytest.approx(line[column]) for line in lines]
    assert tab.run("document.querySelectorAll('#curves svg path').length") > 4
    tiles = tab.run("[...document.querySelectorAll('.tiles dt')].map((each) => each.innerText)")
    assert {"loss, last update", "loss, evaluation"} <= set(tiles)
    assert tab.run("document.querySelector('#instances').innerText").count("slow") >= 2
    assert tab.requests == [(tmp_path / "page.html").as_uri()]
    opened(tab, page.render([{**data_of(tmp_path / "run"), "summary": None}]), tmp_path)
    rows = tab.run("[...document.querySelectorAll('#environment tr')].map((row) => row.innerText)")
    assert any(row.split() == ["last", "checkpoint", "update-00000020"] for row in rows)
    write_lines(tmp_path / "metrics.jsonl", [])
    opened(tab, page.render([data_of(tmp_path)]), tmp_path)
    assert "No update is done yet" in tab.run("document.querySelector('#curves').innerText")


def test_untrusted_text_is_shown_and_not_run(tmp_path: Path, tab: Page) -> None:
    write_run(tmp_path / "run")
    data = {**data_of(tmp_path / "run"), "name": UNTRUSTED, "message": UNTRUSTED}
    data["config"] = {f"training.{UNTRUSTED}": UNTRUSTED}
    opened(tab, page.render([data, {**data, "id": "/other", "name": "other", "config": {}}]), tmp_path)
    assert tab.run("document.title") == "raypod report"
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert UNTRUSTED in tab.run("document.querySelector('#settings').textContent")
    tab.run(f"{LOSS}.dispatchAction({{type: 'showTip', seriesIndex: 0, dataIndex: 5}})")
    assert UNTRUSTED in tab.wait_for("document.querySelector('[data-key=\"curve:loss\"] .chart').textContent")
    assert tab.run("document.querySelectorAll('img').length") == 0


def test_a_click_on_a_head_sorts_the_runs(tmp_path: Path, tab: Page) -> None:
    runs = []
    for number in range(3):
        write_run(tmp_path / f"run-{number}")
        runs.append({**data_of(tmp_path / f"run-{number}"), "update": [30, 200, 4][number]})
    runs[1]["timeline"] = {**runs[1]["timeline"], "end_s": None}
    opened(tab, page.render(runs), tmp_path)
    heads = "[...document.querySelectorAll('#overview .sortable th button')]"
    names = "[...document.querySelectorAll('#overview .sortable tbody tr')].map((row) => row.innerText.split(/\\s/)[0])"

    def click(head: str) -> Any:
        tab.run(f"{heads}.find((each) => each.innerText.startsWith({json.dumps(head)})).click()")
        return tab.run(names)

    assert click("updates") == ["run-2", "run-0", "run-1"]
    assert tab.run("document.querySelector('#overview [aria-sort=ascending]').innerText") == "updates ▲"
    assert tab.run("document.activeElement.innerText") == "updates ▲"
    assert click("updates") == ["run-1", "run-0", "run-2"]
    tab.run(f"raypodReport.update({json.dumps(runs[:2])})")
    assert tab.run(names) == ["run-1", "run-0"], "new data keeps the order"
    assert click("updates") == ["run-0", "run-1"]
    assert click("duration") == ["run-0", "run-1"]
    assert click("duration") == ["run-0", "run-1"], "what is unknown is last"


def test_a_table_of_runs_with_many_metrics_fits_and_names_what_all_runs_share(tmp_path: Path, tab: Page) -> None:
    names = ["bce", "mae", "f1", "auc", "precision_at_5", "recall"]
    for number in range(3):
        write_run(tmp_path / f"k{number}-h8-lr0.01")
        values = dict.fromkeys(names, 0.5 + 0.1234 * number)
        tests = [{"samples": 9, "loss": 1.0, **values, "update": update, "epoch": 1} for update in (20, 40)]
        write_lines(tmp_path / f"k{number}-h8-lr0.01" / "evaluations.jsonl", tests)
    opened(tab, page.render([data_of(folder) for folder in sorted(tmp_path.iterdir())]), tmp_path)
    assert tab.run("[...document.querySelectorAll('#overview .scroll')].every((e) => e.scrollWidth <= e.clientWidth)")
    heads = tab.run("document.querySelector('#overview .sortable thead').innerText")
    note = tab.run("document.querySelector('#overview .note').innerText")
    assert "recall, evaluation" in heads
    assert "lost instances" not in heads
    assert note.startswith("The same in all runs: updates")
    assert "; lost instances 1; " in note


@pytest.mark.parametrize("tab", [{"width": 380}, {"width": 1280}], indirect=True)
def test_more_than_five_runs_have_parallel_coordinates(tmp_path: Path, tab: Page) -> None:
    runs = []
    for number in range(6):
        write_run(tmp_path / f"run-{number}")
        data = data_of(tmp_path / f"run-{number}")
        own = {"training.learning_rate": 10.0**-number, "training.optimizer": UNTRUSTED if number else "adam"}
        runs.append({**data, "config": {**data["config"], **own, "training.flag": number > 2}})
    opened(tab, page.render(runs), tmp_path)
    parallel = "raypodReport.charts.get('parallel')"
    axes = {each["name"]: each for each in tab.run(f"{parallel}.getOption().parallelAxis")}
    assert list(axes)[:3] == ["learning_rate", "optimizer", "flag"]
    assert {"training loss, best", "test accuracy, best"} <= set(axes)
    assert [axes[name]["type"] for name in list(axes)[:3]] == ["log", "category", "category"]
    series = tab.run(f"{parallel}.getOption().series.map((each) => [each.name, each.data[0].slice(0, 3)])")
    assert series[1] == ["run-1", [0.1, UNTRUSTED, "false"]]
    tab.run("document.querySelector('#chips button').click()")  # five are left
    assert tab.run("document.querySelector('[data-key=parallel]')") is None
    tab.run("document.querySelector('#chips button').click()")
    assert tab.run(f"{parallel}.getOption().series.length") == 6
    assert tab.run("document.documentElement.scrollWidth") == tab.run("innerWidth")


@pytest.mark.parametrize("tab", [{"width": 380, "dark": True}, {"width": 1280, "dark": False}], indirect=True)
def test_nothing_is_wider_than_the_window(tmp_path: Path, tab: Page) -> None:
    for number in (1, 2):
        write_run(tmp_path / f"a-run-with-quite-a-long-name-{number}", learning_rate=number / 10, instances=8)
    runs = [data_of(folder) for folder in sorted(tmp_path.iterdir())]
    runs[0]["message"] = "instance 3 on host-b: " + "x" * 200
    opened(tab, page.render(runs), tmp_path)
    is_outside = "each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('svg, .scroll')"
    elements = f"[...document.querySelectorAll('#report *')].filter((each) => {is_outside})"
    assert tab.run(f"{elements}.map((each) => each.outerHTML.slice(0, 90))") == []
    width = tab.run("document.documentElement.scrollWidth")
    assert (width, tab.run(THEME)) in ((380, "dark"), (1280, "light"))
    assert tab.run("[...raypodReport.charts.values()].every((chart) => chart.getWidth() > 250)")


def test_new_data_keeps_the_zoom_and_the_folded_parts(tmp_path: Path, tab: Page) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    zoom = "((z) => [z.startValue, z.endValue])(raypodReport.charts.get('curve:{}').getOption().dataZoom[0])"
    opened(tab, page.render([data_of(tmp_path / "a"), data_of(tmp_path / "b")]), tmp_path)
    tab.run(f"{LOSS}.dispatchAction({{type: 'dataZoom', startValue: 10, endValue: 30}})")
    assert tab.run(zoom.format("accuracy")) == [10, 30]
    tab.run("document.querySelector('#plan details').open = false")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(update_record(61, 0.25)) + "\n")
    runs = [data_of(tmp_path / "a"), data_of(tmp_path / "b")]
    tab.run(f"raypodReport.update({json.dumps(runs)})")
    assert tab.run(SERIES)[0]["data"][-1] == [61, 0.25]
    assert (tab.run(zoom.format("loss")), tab.run(zoom.format("accuracy"))) == ([10, 30], [10, 30])
    assert tab.run("document.querySelector('#plan details').open") is False
    tab.run("document.querySelector('#reset-zoom').click()")
    assert tab.run(zoom.format("loss")) == [1, 61]
    tab.run("raypodReport.update([])")
    assert "No run is selected" in tab.run("document.querySelector('#overview').innerText")
    tab.run(f"raypodReport.update({json.dumps(runs[1:])})")
    assert tab.run("document.querySelector('h1').textContent") == "b"


def test_a_report_of_100_000_updates_is_small_and_opens(tmp_path: Path, tab: Page) -> None:
    losses = [line["loss"] for line in write_run(tmp_path / "run", updates=100_000, instances=16)]
    reader = RunReader(tmp_path / "run")
    reader.refresh()
    text = page.render_bounded([reader.data])
    assert len(text.encode()) < 5_000_000
    opened(tab, text, tmp_path)
    values = [y for _, y in tab.run(SERIES)[0]["data"]]
    assert len(values) < 5000
    assert (max(values), min(values)) == (max(losses), min(losses))


@pytest.mark.parametrize("tab", [{"dark": True}], indirect=True)
def test_a_printed_report_is_light_and_complete(tmp_path: Path, tab: Page) -> None:
    for number in range(5):
        write_run(tmp_path / f"run-{number}")
    opened(tab, page.render([data_of(folder) for folder in sorted(tmp_path.iterdir())]), tmp_path)
    folded = "document.querySelectorAll('details:not([open])').length"
    tab.run(f"addEventListener('beforeprint', () => {{ window.printed = [{THEME}, {folded}]; }})")
    assert len(tab.pdf()) > 50_000
    assert tab.run("window.printed") == ["light", 0]
    assert tab.run(THEME) == "dark"
    assert tab.run(folded) > 0
