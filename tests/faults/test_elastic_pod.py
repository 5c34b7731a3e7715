"""A host is lost for good: the run continues with fewer replicas, and with all again when a host returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import pytest
from harness import Outcome, assert_undisturbed, plan_for, run
from ray_cluster import SECOND_HOST, SIZES, RayCluster, end_host, ray_cluster

from raypod.checkpoint.resume import newest_valid
from raypod.checkpoint.storage import checkpoints_folder
from raypod.errors import HostLost
from raypod.events import EvaluationDone, Resized, RunEnded
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.record import verify_data

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def hosts() -> Iterator[RayCluster]:
    """A Ray cluster of two hosts on this machine; the driver is on the first."""
    with ray_cluster(("", SECOND_HOST)) as started:
        yield started


def plan_on(hosts: RayCluster, folder: Path, training: Optional[Dict[str, Any]] = None, **pod: Any) -> Plan:
    addresses = (hosts.nodes[0].node_ip_address, SECOND_HOST)
    cluster = Cluster("two", tuple(Host(address, address) for address in addresses))
    training = training or {"updates": 60, "lr_schedule": "constant", "ema": 0.9}
    return plan_for(
        folder,
        cluster,
        pod={"num_instances": 2, "elastic": True, **pod},
        training=training,
        run={"checkpoint_every": "10 updates"},
    )


def sizes(outcome: Outcome) -> List[Tuple[int, int, int]]:
    return [(event.replicas_before, event.replicas, event.gradient_accumulation) for event in outcome.of(Resized)]


def test_a_run_shrinks_when_a_host_is_lost_and_grows_when_it_returns(hosts: RayCluster, tmp_path: Path) -> None:
    plan = plan_on(hosts, tmp_path)

    def lose(plan: Plan) -> None:
        end_host(hosts, hosts.nodes[1])

    def give_back(plan: Plan) -> None:
        hosts.cluster.add_node(node_ip_address=SECOND_HOST, **SIZES)

    outcome = run(plan, [(13, lose), (33, give_back)], are_repaired=False)
    (shrunk, grown) = outcome.of(Resized)
    assert sizes(outcome) == [(4, 2, 2), (2, 4, 1)]
    assert shrunk.update >= 13, "a survivor had the state"
    assert shrunk.hosts == (hosts.nodes[0].node_ip_address,)
    assert SECOND_HOST in shrunk.cause
    assert grown.update % 10 == 0
    assert grown.update >= 33
    assert grown.hosts == (hosts.nodes[0].node_ip_address, SECOND_HOST)
    assert outcome.updates == list(range(1, 61))
    (ended,) = outcome.of(RunEnded)
    assert not ended.interrupted
    assert [(each["update"], each["replicas"]) for each in ended.resizes] == [(shrunk.update, 2), (grown.update, 4)]
    assert [repair.restarts for repair in outcome.repairs] == [1, 1], "growth is no restart"
    assert len(outcome.of(EvaluationDone)) == 1
    verdict = verify_data.verify(Path(plan.run_dir))
    assert verdict.is_proved, verdict.lines
    assert any("2 replicas x accumulation 2" in line for line in verdict.lines)


def test_the_ipus_of_another_host_take_all_replicas_without_other_bits(tmp_path: Path) -> None:
    (tmp_path / "inline").mkdir()
    updates = {"training": {"updates": 30, "lr_schedule": "constant"}}
    inline = plan_for(tmp_path / "inline", run={"fleet": "inline"}, pod={"num_instances": 1}, **updates)
    with ray_cluster(("", SECOND_HOST), resources={"IPU": 4}) as hosts:
        plan = plan_on(hosts, tmp_path, **updates)
        outcome = run(plan, [(13, lambda plan: end_host(hosts, hosts.nodes[1]))], are_repaired=False)
    assert not outcome.of(Resized)
    (repair,) = outcome.repairs
    assert repair.hosts == (hosts.nodes[0].node_ip_address,) * 2
    assert_undisturbed(plan, outcome, run(inline))


def test_below_the_fewest_hosts_the_run_ends_with_its_newest_state(hosts: RayCluster, tmp_path: Path) -> None:
    plan = plan_on(hosts, tmp_path, min_hosts=2, elastic=False, wait_hosts=3)
    with pytest.raises(HostLost, match="--min-hosts 2: a plan of 2 replicas uses 1 host; restart hosts") as caught:
        run(plan, [(13, lambda plan: end_host(hosts, hosts.nodes[1]))])
    assert "\n" not in str(caught.value)
    newest, _ = newest_valid(checkpoints_folder(plan.run_dir))
    assert newest is not None
    assert newest.update >= 13
    assert verify_data.verify(Path(plan.run_dir)).is_proved
