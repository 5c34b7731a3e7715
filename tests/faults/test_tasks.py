"""The tasks of the documentation: one hash for every placement, a killed instance, and a resume elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Dict

import pytest
from documented import modules
from harness import Outcome, assert_undisturbed, plan_for, run, send

from raypod.checkpoint import resume
from raypod.coordinator import coordinator
from raypod.events import EvaluationDone
from raypod.fleet.ray import RayFleet
from raypod.record.metrics import MetricsAggregator

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TRAINING = {"updates": 20, "epochs": 9, "evaluate_every": 1}
TASKS: Dict[str, Dict[str, Any]] = {
    "diabetes": {"task": {"name": "diabetes:Diabetes", "hidden": 16}, "training": TRAINING},
    "language-model": {
        "task": {"name": "language-model", "sequence_length": 16, "max_mb": 0.006, "dropout": 0.1},
        "training": {**TRAINING, "max_grad_norm": 1.0},
    },
    "shapes": {"task": {"name": "shapes:Shapes"}, "training": TRAINING, "data": {"num_workers": 1}},
}


@pytest.fixture(params=list(TASKS))
def sections(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dict[str, Any]:
    """The config of a task, whose module is in the current folder."""
    for name, code in modules("tutorials/your-own-task.md").items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return TASKS[request.param]


def test_placements_a_killed_instance_and_a_resume_have_equal_hashes(
    session: Any, sections: Dict[str, Any], tmp_path: Path
) -> None:
    one = plan_for(
        tmp_path / "1x4",
        run={"fleet": "inline", "checkpoint_every": "10 updates"},
        pod={"num_instances": 1},
        **sections,
    )
    undisturbed = run(one)
    two = plan_for(tmp_path / "2x2", pod={"num_instances": 2}, **sections)
    assert_undisturbed(two, run(two, [(5, send(signal.SIGKILL, 1))]), undisturbed)
    checkpoint = Path(one.run_dir) / "checkpoints" / "update-00000010"
    four = plan_for(tmp_path / "4x1", run={"resume": str(checkpoint)}, pod={"num_instances": 4}, **sections)
    resumed = resume.find_checkpoint(four).checkpoint
    events = Outcome(list(coordinator.run(four, RayFleet(four), MetricsAggregator(four, 0.0), resumed)))
    assert (events.sha256, events.updates) == (undisturbed.sha256, list(range(11, 21)))
    assert events.of(EvaluationDone)[-1] == undisturbed.of(EvaluationDone)[-1]
