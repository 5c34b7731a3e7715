"""A training that is mirrored to a storage and resumed from there, and the report of a run in a browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from raypod import train
from raypod.__main__ import main
from tests.support.browser import Browser, find_chromium
from tests.support.mirrored_runs import FLAGS, different_files, verified

pytestmark = pytest.mark.usefixtures("processes")


def hash_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


def trained(run: Path, *flags: str) -> Path:
    line = [*FLAGS, "--checkpoint-every", "10 updates", "--run-dir", str(run), *flags]
    assert train.main(line) == 0
    return run


def test_a_run_continues_in_another_folder_from_the_storage(tmp_path: Path, capfd: Any) -> None:
    url = f"file://{tmp_path}/remote"
    cut = trained(tmp_path / "cut", "--updates", "20", "--storage-path", url)
    assert "warning" not in capfd.readouterr().out
    found = json.loads((cut / "summary.json").read_text())["storage"]
    assert (found["url"], found["not_mirrored"], found["failures"]) == (f"{url}/cut", [], 0)
    assert verified(url, "cut", tmp_path / "copy")[-1] == "update-00000020"
    assert not different_files(cut, tmp_path / "copy")
    shutil.rmtree(str(cut))  # the head's disk is lost
    again = tmp_path / "again"
    assert train.main(["--resume", f"{url}/cut", "--updates", "30", "--run-dir", str(again)]) == 0
    assert hash_of(again) == hash_of(trained(tmp_path / "whole", "--updates", "30"))
    capfd.readouterr()
    assert main(["verify-data", f"{url}/again"]) == 0
    assert "proved: 30 updates" in capfd.readouterr().out


def test_the_report_of_a_run_draws_its_metrics_in_a_browser(tmp_path: Path) -> None:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    run = trained(tmp_path / "run", "--updates", "12")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    with Browser(path) as browser, browser.page() as tab:
        tab.open((run / "report.html").as_uri())
        tab.wait_for("window.raypodReport && raypodReport.ready")
        series = tab.run("raypodReport.charts.get('curve:loss').getOption().series.map((each) => each.data)")
        assert series[0] == [[update, loss] for update, loss in enumerate(losses, 1)]
        assert tab.run("document.querySelector('h1').textContent") == "run"
        assert (tab.errors, tab.requests) == ([], [(run / "report.html").as_uri()])
