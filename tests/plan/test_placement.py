"""Where instances are placed, and that every number which a message offers is one that a plan accepts."""

from __future__ import annotations

import pytest

from raypod.errors import ClusterError, ConfigError, RaypodError
from raypod.plan.cluster import Cluster, Host, VipuPartition
from raypod.plan.placement import (
    Placement,
    Sizes,
    device_id,
    fits,
    hint,
    link_domain_index,
    num_gcds,
    partition_conflict,
    place,
)


def pod(hosts: int, ipus: int | None = None, slots: int | None = None) -> Cluster:
    return Cluster("pod", tuple(Host(f"h{index}", f"10.0.0.{index}", ipus, 4, slots) for index in range(hosts)))


def placed(hosts: int, replicas: int, instances: int, ipus: int) -> Placement:
    return place(pod(hosts), Sizes(replicas, instances, ipus))


def test_instances_follow_the_hosts_in_order() -> None:
    placement = place(pod(2, 16), Sizes(8, 4, 1), threads_per_replica=0)
    found = [(spec.host, spec.local_index, spec.replica_offset) for spec in placement.instances]
    assert found == [("h0", 0, 0), ("h0", 1, 2), ("h1", 0, 4), ("h1", 1, 6)]
    assert {spec.threads_per_replica for spec in placement.instances} == {1}  # 4 cores for 4 replicas on each host


def test_sizes_are_checked() -> None:
    with pytest.raises(ClusterError, match="host h0 of pod has 16 IPUs and the plan puts 32 on it"):
        place(pod(2, 16), Sizes(16, 2, 4))
    hosts = "3 instances cannot be divided equally between the 2 hosts of pod; --num-instances can be 6$"
    with pytest.raises(ConfigError, match=hosts):
        placed(2, 6, 3, 1)
    with pytest.raises(ConfigError, match="6 replicas .* 4 instances; .* 1, 2, 3, 6"):
        Sizes(6, 4, 1)
    with pytest.raises(ConfigError, match="64 replicas x 2 .* 128 IPUs.*instances 2"):
        Sizes(64, 1, 2)


def test_device_ids_link_domains_and_partitions() -> None:
    placement = placed(1, 8, 4, 2)  # the known case
    assert [device_id(spec, placement) for spec in placement.instances] == [24, 25, 26, 27]
    placement = placed(1, 6, 2, 1)
    assert device_id(placement.instances[0], placement) is None
    placement = placed(4, 8, 8, 1)
    assert [link_domain_index(spec, placement, 2) for spec in placement.instances] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert num_gcds(VipuPartition("p"), placed(1, 4, 2, 1)) == 2
    placement = placed(1, 8, 2, 1)
    assert "use --num-instances 4" in str(partition_conflict(VipuPartition("p", gcds=4), placement))
    assert "has 4 IPUs and the run needs 8" in str(partition_conflict(VipuPartition("p", size=4), placement))
    assert partition_conflict(VipuPartition("p", size=8, gcds=2), placement) is None
    assert partition_conflict(VipuPartition("p", size=16, gcds=1), placement) is None


@pytest.mark.parametrize(
    ("hosts", "replicas", "instances", "ipus", "words"),
    [
        (pod(4, 16), 64, 3, 1, "; --num-instances can be 4, 8, 16, 32, 64"),
        (pod(4, 16, slots=2), 64, 3, 1, "; --num-instances can be 4, 8"),
        (pod(2), 7, 3, 1, ""),  # 3 instances do not fit 2 hosts, and 7 is a prime
        (pod(2), 12, 3, 1, "; --num-instances can be 6, 12"),
        (pod(3), 10, 3, 1, "; use --replicas 6"),
        (pod(3), 10, 3, 3, ""),
        (pod(2), 10, 4, 0, "; --num-instances can be 1, 2, 10"),
    ],
)
def test_offered_numbers(hosts: Cluster, replicas: int, instances: int, ipus: int, words: str) -> None:
    assert not fits(hosts, replicas, instances, ipus)
    assert hint(hosts, replicas, instances, ipus) == words


@pytest.mark.parametrize("hosts", [pod(1), pod(3), pod(2, 4), pod(2, slots=1)])
@pytest.mark.parametrize("ipus", [0, 1, 2])
def test_a_number_fits_if_it_can_be_placed(hosts: Cluster, ipus: int) -> None:
    for replicas in range(1, 13):
        for instances in range(1, replicas + 1):
            try:
                is_placed = place(hosts, Sizes(replicas, instances, ipus)).sizes.local_ipus in (0, 1, 2, 4, 8, 16)
            except RaypodError:
                is_placed = False
            assert fits(hosts, replicas, instances, ipus) == is_placed, (replicas, instances)
