"""A repair in which the devices of the survivors are unusable, as on IPUs, with snapshots and without."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, List

import pytest

from raypod.errors import InstanceFailed
from raypod.plan import layout
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.runs import ledger
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.faulty_runs import assert_undisturbed, plan_for, run, send
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
            assert_undisturbed(plan, disturbed, undisturbed)  # and `verify-data` proves the samples
            repeated = max(calls_before(plan, repair.generation)) - repair.update
            if every:
                assert repair.seeded_from.startswith("the snapshot of host ")
                assert repeated <= EVERY
            else:
                assert Path(repair.seeded_from).name == "update-00000010"
                assert repeated >= KILLED_AT - 10
        section = {"pod": {"num_instances": 2}, "run": {"snapshot_every": EVERY, "max_restarts": 0}}
        ended = plan_of("ended", Cluster("two", hosts), **section)
        with pytest.raises(InstanceFailed, match="failed"):
            run(ended, [(KILLED_AT, send(signal.SIGKILL, 1))])
    newest, _ = newest_valid(checkpoints_folder(ended.run_dir))
    assert newest is not None
    assert newest.update >= KILLED_AT - EVERY
    assert newest.update % 10
    resumed = plan_of("ended", pod={"num_instances": 1}, run={"fleet": "inline", "resume": ended.run_dir})
    assert run(resumed).sha256 == undisturbed.sha256


def calls_before(plan: Plan, generation: int) -> List[int]:
    """Return the updates of the calls before a generation, from the ledger."""
    lines, _ = ledger.read(Path(plan.run_dir) / layout.LEDGER)
    return [line.update + 1 for line in lines if isinstance(line, ledger.CallRecord) and line.generation < generation]
