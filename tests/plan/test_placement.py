from __future__ import annotations

import pytest

from raypod.plan.cluster import Cluster, Host, VipuPartition
from raypod.plan.environment import device_environment
from raypod.plan.placement import Placement, Sizes, device_id, link_domain_index, num_gcds, partition_conflict, place


def placed(hosts: int, replicas: int, instances: int, ipus: int, vipu: VipuPartition) -> Placement:
    cluster = Cluster("pod", tuple(Host(f"h{n}", f"h{n}") for n in range(hosts)), vipu=vipu)
    return place(cluster, Sizes(replicas, instances, ipus))


def test_devices_of_the_reference_arrangement() -> None:
    placement = placed(1, 8, 4, 2, VipuPartition("p"))
    assert [device_id(spec, placement) for spec in placement.instances] == [24, 25, 26, 27]  # contract section 6.3


def test_an_instance_whose_ipus_are_no_power_of_two_has_no_device() -> None:
    placement = placed(1, 6, 2, 1, VipuPartition("p"))
    assert device_id(placement.instances[0], placement) is None


def test_link_domains_are_equal_blocks() -> None:
    placement = placed(4, 8, 8, 1, VipuPartition("p", link_domains=2))
    assert [link_domain_index(spec, placement, 2) for spec in placement.instances] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("gcds", "expected"), [(4, ["0", "1", "2", "3"]), (1, ["0"] * 4), (None, ["0", "1", "2", "3"])]
)
def test_every_instance_is_led_to_its_gcd(gcds: int, expected: list[str]) -> None:
    placement = placed(2, 8, 4, 2, VipuPartition("p", server="v", port=9000, gcds=gcds))
    found = [device_environment(placement, spec) for spec in placement.instances]
    assert [env["IPUOF_VIPU_API_GCD_ID"] for env in found] == expected
    assert {env["IPUOF_VIPU_API_HOST"] for env in found} == {"v"}
    assert {env["IPUOF_VIPU_API_PORT"] for env in found} == {"9000"}
    assert {env["IPUOF_VIPU_API_PARTITION_ID"] for env in found} == {"p"}


def test_without_a_partition_nothing_is_set() -> None:
    placement = place(Cluster("pod", (Host("h", "h"),)), Sizes(2, 2, 1))
    assert device_environment(placement, placement.instances[0]) == {}


def test_a_partition_that_does_not_fit_is_told() -> None:
    assert num_gcds(VipuPartition("p"), placed(1, 4, 2, 1, VipuPartition("p"))) == 2
    placement = placed(1, 8, 2, 1, VipuPartition("p"))
    assert "use --num-instances 4" in str(partition_conflict(VipuPartition("p", gcds=4), placement))
    assert "has 4 IPUs and the run needs 8" in str(partition_conflict(VipuPartition("p", size=4), placement))
    assert partition_conflict(VipuPartition("p", size=8, gcds=2), placement) is None
    assert partition_conflict(VipuPartition("p", size=16, gcds=1), placement) is None
