"""The model of a pod in `scripts/simulate_pod.py`, against what can be computed by hand."""

from __future__ import annotations

import pytest
import simulate_pod
from simulate_pod import Costs, Pod

FREE = Costs(stage_s=0.0, exchange_s=0.0, report_s=1e-4, driver_s=2e-4, report_bytes=1000.0, latency_s=0.0)


def test_two_hosts_transfer_at_the_speed_of_their_link() -> None:
    pod = Pod(hosts=2, per_host=1, gbit=8.0, efficiency=1.0)  # 1 GB/s
    chunk_s = simulate_pod.CHUNK_BYTES / 1e9
    assert simulate_pod.seeding_s(pod, FREE, 1e9) == pytest.approx(1.0 + chunk_s)
    assert simulate_pod.exchange_s(pod, FREE, 1e9) == pytest.approx(1.0)  # half of it, to and fro


def test_a_longer_chain_adds_the_time_of_a_chunk_per_link() -> None:
    few, many = (simulate_pod.seeding_s(Pod(hosts, 1, 8.0, 0, 1.0), FREE, 1e9) for hosts in (2, 66))
    assert many - few == pytest.approx(64 * simulate_pod.CHUNK_BYTES / 1e9)


def test_instances_of_a_host_send_as_much_to_others_as_one_would() -> None:
    size = 1e9
    for per_host in (1, 4, 16):
        pod = Pod(hosts=16, per_host=per_host, gbit=100.0)
        assert simulate_pod.sent_by_a_host(pod, size) == pytest.approx(2 * 15 / 16 * size)
    assert simulate_pod.sent_by_a_host(Pod(1, 16, 100.0), size) == 0


def test_processes_on_shared_cores_take_turns() -> None:
    costs = Costs(stage_s=1e-9, exchange_s=1e-9, report_s=0.0, driver_s=0.0, report_bytes=0.0, latency_s=0.0)
    shared, own = Pod(8, 1, 0.0, cores_of_all=2), Pod(8, 1, 0.0)
    assert simulate_pod.exchange_s(shared, costs, 1e9) == pytest.approx(4 * simulate_pod.exchange_s(own, costs, 1e9))
    assert simulate_pod.seeding_s(shared, costs, 1e9) == pytest.approx(
        7 * simulate_pod.seeding_s(own, costs, 1e9), rel=0.01
    )
