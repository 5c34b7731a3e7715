"""The survivor of a killed instance, whose device is unusable after its call has failed, as on IPUs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, List

import pytest

from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.runs import verify_data
from tests.support.faulty_runs import plan_for, run, send, starts
from tests.support.ray_cluster import SECOND_HOST, ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
# The calls take so long that the survivor is in one, whenever the coordinator hears of an update.
FAULT = {"EMULATED_POD_DEVICE_FAULT": "unusable", "EMULATED_POD_CALL_S": "0.2"}


def losses(plan: Plan) -> List[float]:
    lines = (Path(plan.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_survivor_with_an_unusable_device_is_replaced_and_no_result_changes(tmp_path: Path) -> None:
    sections: Any = {"training": {"updates": 60, "lr_schedule": "constant"}, "pod": {"replicas": 2, "num_instances": 2}}
    run_section = {"checkpoint_every": "20 updates"}
    whole = plan_for(tmp_path / "whole", **{**sections, "pod": {"replicas": 2}, "run": {"fleet": "inline"}})
    undisturbed = run(whole)
    with ray_cluster(variables=FAULT) as started:
        hosts = tuple(Host(each, each) for each in (str(started.nodes[0].node_ip_address), SECOND_HOST))
        plan = plan_for(tmp_path / "disturbed", Cluster("two", hosts), **sections, run=run_section)
        disturbed = run(plan, [(24, send(signal.SIGKILL, 0))])
        assert starts(plan) == [2, 2]
    assert disturbed.lost == [(0, "died"), (1, "device")]
    assert disturbed.losses[1].recovery_action == "IPU_RESET"
    (repair,) = disturbed.repairs
    assert (Path(repair.seeded_from).name, repair.lost) == ("update-00000020", (0, 1))
    assert disturbed.sha256 == undisturbed.sha256
    assert losses(plan) == losses(whole)
    verdict = verify_data.verify(Path(plan.run_dir))
    assert verdict.is_proved, verdict.lines
