"""Training under Ray, its resume elsewhere, a storage that a run continues from, and a report in a browser."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from raypod import train
from raypod.__main__ import main
from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.values import TRACES
from raypod.runs import verify_data
from raypod.runs.metrics import traces_of
from tests.support.browser import Browser, find_chromium
from tests.support.documented import modules
from tests.support.faulty_runs import plan_for, run, send, starts
from tests.support.mirrored_runs import FLAGS, different_files, verified

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


def test_the_default_job_trains(session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main(["--epochs", "4"]) == 0
    out = capsys.readouterr().out
    assert "2 instances x 2 replicas x 1 IPU = 4 IPUs" in out
    (run_dir,) = tmp_path.glob("runs/*-digits-resnet8")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["updates"], summary["epochs"], summary["restarts"]) == (176, 4, 0)
    assert summary["test_accuracy"] >= 90
    assert f"Test accuracy: {summary['test_accuracy']:.2f} % of 360 images" in out
    assert (run_dir / "report.html").is_file()
    assert verify_data.verify(run_dir).is_proved


def test_a_run_resumes_elsewhere_with_instances_that_are_killed(session: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The task of the documentation, whose data is loaded by workers."""
    for name, code in modules("tutorials/your-own-task.md").items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    training = {"updates": 20, "epochs": 9, "evaluate_every": 1}
    task = {"task": {"name": "shapes:Shapes"}, "training": training, "data": {"num_workers": 1}}
    log = ["grad-norm", "weight-norm", "update-ratio"]
    inline = {"fleet": "inline", "checkpoint_every": "10 updates", "log": log}
    one = plan_for(tmp_path / "1x4", run=inline, pod={"num_instances": 1}, **task)
    whole = run(one)
    checkpoint = f"{one.run_dir}/checkpoints/update-00000010"
    four = plan_for(tmp_path / "4x1", run={"resume": checkpoint, "log": log}, pod={"num_instances": 4}, **task)
    outcome = run(four, [(13, send(signal.SIGKILL, 0, 2))])
    assert (outcome.sha256, outcome.updates) == (whole.sha256, list(range(11, 21)))
    assert sorted(outcome.lost) == [(0, "died"), (2, "died")]
    assert starts(four) == [2, 1, 2, 1]
    assert outcome.of(EvaluationDone)[-1] == whole.of(EvaluationDone)[-1]
    of_whole = [(each.update, traces_of(each)) for each in whole.of(UpdateDone)]
    assert [(each.update, traces_of(each)) for each in outcome.of(UpdateDone)] == of_whole[10:]
    assert set(of_whole[0][1]) == set(TRACES)


def hash_of(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


def trained(run: Path, *flags: str) -> Path:
    line = [*FLAGS, "--checkpoint-every", "10 updates", "--run-dir", str(run), *flags]
    assert train.main(line) == 0
    return run


def test_a_run_continues_in_another_folder_from_the_storage(processes: None, tmp_path: Path, capfd: Any) -> None:
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


def test_the_report_of_a_run_draws_its_metrics_in_a_browser(processes: None, tmp_path: Path) -> None:
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
