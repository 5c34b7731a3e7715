"""Every number that a message offers is one that a plan accepts."""

from __future__ import annotations

import dataclasses

import pytest

from raypod.errors import RaypodError
from raypod.plan.cluster import Cluster, Host
from raypod.plan.fitting import fits, way_out
from raypod.plan.placement import Sizes, place


def cluster(hosts: int, ipus: int | None = None, slots: int | None = None) -> Cluster:
    host = Host("", "", ipus=ipus, slots=slots)
    return Cluster("pod", tuple(dataclasses.replace(host, name=str(each), address=str(each)) for each in range(hosts)))


@pytest.mark.parametrize(
    ("pod", "replicas", "instances", "ipus", "words"),
    [
        (cluster(4, ipus=16), 64, 3, 1, "; --num-instances can be 4, 8, 16, 32, 64"),
        (cluster(4, ipus=16, slots=2), 64, 3, 1, "; --num-instances can be 4, 8"),
        (cluster(2), 7, 3, 1, ""),  # 3 instances do not fit 2 hosts, and 7 is a prime
        (cluster(2), 12, 3, 1, "; --num-instances can be 6, 12"),
        (cluster(3), 10, 3, 1, "; use --replicas 6"),
        (cluster(3), 10, 3, 3, ""),
        (cluster(2), 10, 4, 0, "; --num-instances can be 1, 2, 10"),
    ],
)
def test_offered_numbers(pod: Cluster, replicas: int, instances: int, ipus: int, words: str) -> None:
    assert not fits(pod, replicas, instances, ipus)
    assert way_out(pod, replicas, instances, ipus) == words


@pytest.mark.parametrize("pod", [cluster(1), cluster(3), cluster(2, ipus=4), cluster(2, slots=1)])
@pytest.mark.parametrize("ipus", [0, 1, 2])
def test_a_number_fits_if_it_can_be_placed(pod: Cluster, ipus: int) -> None:
    for replicas in range(1, 13):
        for instances in range(1, replicas + 1):
            try:
                is_placed = place(pod, Sizes(replicas, instances, ipus)).sizes.local_ipus in (0, 1, 2, 4, 8, 16)
            except RaypodError:
                is_placed = False
            assert fits(pod, replicas, instances, ipus) == is_placed, (replicas, instances)
