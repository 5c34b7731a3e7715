"""Training under Ray with the default job, and a resume with another number of instances."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from raypod import train
from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.values import TRACES
from raypod.runs import verify_data
from raypod.runs.metrics import traces_of
from tests.support.documented import modules
from tests.support.faulty_runs import plan_for, run, send, starts

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


def test_a_run_resumes_elsewhere_with_other_instances_of_which_two_are_killed(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
