"""A training whose calls hold the interpreter lock for longer than an instance may be silent."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from raypod.plan.cluster import Cluster, Host
from tests.support.faulty_runs import assert_undisturbed, plan_for, run, send
from tests.support.ray_cluster import SECOND_HOST, ray_cluster

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
