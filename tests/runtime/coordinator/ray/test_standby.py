"""Standbys that replace killed instances, under Ray."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Callable

import pytest

from raypod.plan.plan import Plan
from tests.support.bounded import wait_until
from tests.support.faulty_runs import assert_undisturbed, plan_for, run, send, starts
from tests.support.ray_cluster import ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
DATA = """
import os, pathlib, torch
class Data:
    def __init__(self, samples): self.samples = samples
    def __len__(self): return self.samples
    def __getitem__(self, index): return torch.full((1, 8, 8), index / self.samples), index % 2
def data(folder):
    pathlib.Path(f"loaded-{os.getpid()}").touch()
    return Data(640), Data(8), 2
"""


def test_a_standby_continues_as_the_killed_instance_and_another_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "marked_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def plan_of(name: str, instances: int, **section: Any) -> Plan:
        data = {"dataset": "marked_data:data"}
        return plan_for(tmp_path / name, data=data, pod={"num_instances": instances}, run=section)

    def kill(instance: int, processes: int) -> Callable[[Plan], None]:
        def inject(plan: Plan) -> None:
            assert wait_until(lambda: len(list(tmp_path.glob("loaded-*"))) == processes)
            send(signal.SIGKILL, instance)(plan)

        return inject

    undisturbed = run(plan_of("undisturbed", 1, fleet="inline"))
    plan = plan_of("standby", 2, standby=1)
    for path in tmp_path.glob("loaded-*"):  # of this process
        path.unlink()
    with ray_cluster(("",)):
        outcome = run(plan, [(6, kill(1, 3)), (14, kill(0, 4))])
    assert_undisturbed(plan, outcome, undisturbed)
    assert outcome.lost == [(1, "died"), (0, "died")]
    assert starts(plan) == [2, 2]
    for index in (0, 1):
        assert ": continued by a standby on " in Path(plan.log_file(index)).read_text()
