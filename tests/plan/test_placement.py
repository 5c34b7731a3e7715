from __future__ import annotations

from typing import Optional

import pytest

from raypod.errors import ClusterError, ConfigError
from raypod.plan.cluster import Cluster, Host, VipuPartition
from raypod.plan.placement import Placement, Sizes, device_id, link_domain_index, num_gcds, partition_conflict, place


def pod(hosts: int, ipus: Optional[int] = None) -> Cluster:
    return Cluster("pod", tuple(Host(f"h{index}", f"10.0.0.{index}", ipus, 4) for index in range(hosts)))


def placed(hosts: int, replicas: int, instances: int, ipus: int) -> Placement:
    return place(pod(hosts), Sizes(replicas, instances, ipus))


def test_instances_follow_the_hosts_in_order() -> None:
    placement = place(pod(2, 16), Sizes(8, 4, 1), threads_per_replica=0)
    assert [(spec.host, spec.local_index, spec.replica_offset) for spec in placement.instances] == [
        ("h0", 0, 0),
        ("h0", 1, 2),
        ("h1", 0, 4),
        ("h1", 1, 6),
    ]
    assert {spec.threads_per_replica for spec in placement.instances} == {1}  # 4 cores for 4 replicas on each host


def test_more_ipus_than_a_host_has_are_an_error() -> None:
    with pytest.raises(ClusterError, match="host h0 of pod has 16 IPUs and the plan puts 32 on it"):
        place(pod(2, 16), Sizes(16, 2, 4))


def test_instances_that_cannot_be_divided_between_the_hosts_are_an_error() -> None:
    hosts = "3 instances cannot be divided equally between the 2 hosts of pod; --num-instances can be 6$"
    with pytest.raises(ConfigError, match=hosts):
        placed(2, 6, 3, 1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 4, 1), "6 replicas .* 4 instances; .* 1, 2, 3, 6"),
        ((64, 1, 2), "64 replicas x 2 .* 128 IPUs.*instances 2"),
    ],
)
def test_sizes_are_checked(sizes: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sizes(*sizes)


def test_device_ids_of_the_known_case() -> None:
    placement = placed(1, 8, 4, 2)
    assert [device_id(spec, placement) for spec in placement.instances] == [24, 25, 26, 27]


def test_an_instance_without_a_power_of_two_of_ipus_has_no_device() -> None:
    placement = placed(1, 6, 2, 1)
    assert device_id(placement.instances[0], placement) is None


def test_link_domains_are_equal_blocks_of_instances() -> None:
    placement = placed(4, 8, 8, 1)
    assert [link_domain_index(spec, placement, 2) for spec in placement.instances] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_partition_that_does_not_fit_is_reported() -> None:
    assert num_gcds(VipuPartition("p"), placed(1, 4, 2, 1)) == 2
    placement = placed(1, 8, 2, 1)
    assert "use --num-instances 4" in str(partition_conflict(VipuPartition("p", gcds=4), placement))
    assert "has 4 IPUs and the run needs 8" in str(partition_conflict(VipuPartition("p", size=4), placement))
    assert partition_conflict(VipuPartition("p", size=8, gcds=2), placement) is None
    assert partition_conflict(VipuPartition("p", size=16, gcds=1), placement) is None
