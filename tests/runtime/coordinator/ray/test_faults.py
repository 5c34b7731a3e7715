"""Killed instances under Ray: unusable devices, calls that hold the interpreter lock, standbys."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Callable, List

import pytest

from raypod.errors import InstanceFailed
from raypod.plan import layout
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.runs import ledger
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.bounded import wait_until
from tests.support.faulty_runs import assert_undisturbed, plan_for, run, send, starts
from tests.support.ray_cluster import SECOND_HOST, ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
# Calls take longer than a report on its way: two snapshots do not overtake it.
UNUSABLE = {"EMULATED_POD_DEVICE_FAULT": "unusable", "EMULATED_POD_CALL_S": "0.1"}
EVERY = 2
KILLED_AT = 13


def test_a_repair_without_a_usable_device_repeats_the_updates_since_the_snapshot(tmp_path: Path) -> None:
    """The model has batch normalization, and its average is kept: a snapshot has their states, too."""

    def plan_of(name: str, *arguments: Any, **sections: Any) -> Plan:
        pod = {"replicas": 4, **sections.get("pod", {})}
        section = {"checkpoint_every": "10 updates", **sections.get("run", {})}
        return plan_for(tmp_path / name, *arguments, training={"updates": 24, "ema": 0.9}, pod=pod, run=section)

    undisturbed = run(plan_of("undisturbed", pod={"num_instances": 1}, run={"fleet": "inline"}))
    with ray_cluster(variables=UNUSABLE) as started:
        hosts = tuple(Host(each, each) for each in (str(started.nodes[0].node_ip_address), SECOND_HOST))
        for every in (0, EVERY):
            section = {"pod": {"num_instances": 2}, "run": {"snapshot_every": every}}
            plan = plan_of(f"every-{every}", Cluster("two", hosts), **section)
            disturbed = run(plan, [(KILLED_AT, send(signal.SIGKILL, 1))])
            (repair,) = disturbed.repairs
            assert sorted(disturbed.lost) == [(0, "device"), (1, "died")]
            assert disturbed.losses[-1].recovery_action == "IPU_RESET"
            assert (repair.lost, starts(plan)) == ((0, 1), [2, 2])
            assert_undisturbed(plan, disturbed, undisturbed)  # and `verify-data` proves the samples
            repeated = max(calls_before(plan, repair.generation)) - repair.update
            source = "the snapshot of host " if every else f"{plan.run_dir}/checkpoints/update-00000010"
            assert repair.seeded_from.startswith(source)
            assert repeated <= EVERY if every else repeated >= KILLED_AT - 10
        section = {"pod": {"num_instances": 2}, "run": {"snapshot_every": EVERY, "max_restarts": 0}}
        ended = plan_of("ended", Cluster("two", hosts), **section)
        with pytest.raises(InstanceFailed, match="failed"):
            run(ended, [(KILLED_AT, send(signal.SIGKILL, 1))])
    newest: Any = newest_valid(checkpoints_folder(ended.run_dir))[0]
    assert newest.update >= KILLED_AT - EVERY
    assert newest.update % 10
    resumed = plan_of("ended", pod={"num_instances": 1}, run={"fleet": "inline", "resume": ended.run_dir})
    assert run(resumed).sha256 == undisturbed.sha256


def calls_before(plan: Plan, generation: int) -> List[int]:
    """Return the updates of the calls before a generation, from the ledger."""
    lines, _ = ledger.read(Path(plan.run_dir) / layout.LEDGER)
    return [line.update + 1 for line in lines if isinstance(line, ledger.CallRecord) and line.generation < generation]


HELD_S = {"EMULATED_POD_CALL_S": "14", "EMULATED_POD_LOAD_S": "14"}


def test_long_calls_are_no_failure_and_the_survivor_of_a_death_ends_its_call(tmp_path: Path) -> None:
    sections: Any = {
        "pod": {"replicas": 2, "num_instances": 2},
        "run": {"silent_after_s": 12.0},
        "training": {"updates": 4, "device_iterations": 2, "evaluation_iterations": 32},  # one call evaluates
    }
    undisturbed = run(plan_for(tmp_path / "short", **{**sections, "run": {"fleet": "inline"}, "pod": {"replicas": 2}}))
    with ray_cluster(variables=HELD_S) as started:
        hosts = tuple(Host(each, each) for each in (str(started.nodes[0].node_ip_address), SECOND_HOST))
        plan = plan_for(tmp_path / "long", Cluster("two", hosts), **sections)
        disturbed = run(plan, [(2, send(signal.SIGKILL, 0))])
    assert disturbed.lost == [(0, "died")]
    assert_undisturbed(plan, disturbed, undisturbed)


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


def test_a_standby_replaces_a_killed_instance_and_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (outcome.lost, starts(plan)) == ([(1, "died"), (0, "died")], [2, 2])
    for index in (0, 1):
        assert ": continued by a standby on " in Path(plan.log_file(index)).read_text()
