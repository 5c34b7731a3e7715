"""An instance is frozen while the others pause, for Ctrl-C or for a checkpoint: the results of an undisturbed run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from harness import Outcome, plan_for, run, send

from raypod.events import RunEnded, UpdateDone
from raypod.plan.plan import Plan
from raypod.record import verify_data

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

UPDATES, FROZEN = 12, 3
# The instances load for longer than it takes to request a pause, so the survivors wait for its end between two calls.
SLOW_DATA = """
import os, time, torch

class Data:
    def __init__(self, samples): self.samples = samples
    def __len__(self): return self.samples
    def __getitem__(self, index):
        if os.environ["POPDIST_NUM_LOCAL_REPLICAS"] == "1":
            time.sleep(0.06)
        return torch.full((1, 8, 8), float(index % 17)) + torch.arange(8.0), index % 10

def make(folder): return Data(640), Data(8), 10
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_data.py").write_text(SLOW_DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def plan_of(folder: Path, name: str, **run_section: Any) -> Plan:
    (folder / name).mkdir()
    fleet = {"fleet": "inline"} if name == "inline" else {"silent_after_s": 10, "start_timeout_s": 300}
    return plan_for(
        folder / name,
        data={"dataset": "slow_data:make"},
        training={"updates": UPDATES, "warmup_updates": 1},
        pod={"num_instances": 1 if name == "inline" else 4},
        run={**fleet, **run_section},
    )


def results(outcome: Outcome) -> List[Tuple[int, Dict[str, float]]]:
    return [(event.update, event.metrics) for event in outcome.of(UpdateDone)]


def assert_undisturbed_but_for_the_frozen_one(plan: Plan, outcome: Outcome, undisturbed: Outcome) -> None:
    """Assert that a run, which may have ended earlier, has the results of one without faults."""
    done = results(outcome)
    assert done == results(undisturbed)[: len(done)]
    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [metrics["loss"] for _, metrics in done]
    assert [line for line in verify_data.verify(Path(plan.run_dir)).lines if line.startswith("NOT PROVED")] == []
    assert [(loss.instance, loss.kind) for loss in outcome.losses] == [(FROZEN, "silent")]
    for survivor in range(FROZEN):
        assert Path(plan.log_file(survivor)).read_text().count(", pid ") == 1


def test_an_instance_is_frozen_during_the_pause_of_a_checkpoint(session: Any, folder: Path) -> None:
    reference = run(plan_of(folder, "inline"))
    plan = plan_of(folder, "ray", checkpoint_every="0.03 minutes")
    outcome = run(plan, [(4, send(signal.SIGSTOP, FROZEN))])
    assert_undisturbed_but_for_the_frozen_one(plan, outcome, reference)
    assert outcome.sha256 == reference.sha256


def test_an_instance_is_frozen_during_the_pause_of_ctrl_c(session: Any, folder: Path) -> None:
    def freeze_and_interrupt(plan: Plan) -> None:
        send(signal.SIGSTOP, FROZEN)(plan)
        signal.raise_signal(signal.SIGINT)

    reference = run(plan_of(folder, "inline"))
    plan = plan_of(folder, "ray")
    outcome = run(plan, [(4, freeze_and_interrupt)])
    assert_undisturbed_but_for_the_frozen_one(plan, outcome, reference)
    (ended,) = outcome.of(RunEnded)
    assert ended.interrupted
    assert ended.checkpoint is not None
    assert ended.updates == len(outcome.updates) >= 4
