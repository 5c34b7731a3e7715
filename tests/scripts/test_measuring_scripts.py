"""Scripts that measure: a model of a pod against what can be computed by hand, errors, and a table of start-ups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bench_half
import bench_recovery
import pytest
import simulate_pod
import startup_table
import torch
from bench_recovery import Line
from simulate_pod import Costs, Pod

from tests.support.run_folders import write_run

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
    for seconds_of, turns in ((simulate_pod.exchange_s, 4), (simulate_pod.seeding_s, 7)):
        assert seconds_of(shared, costs, 1e9) == pytest.approx(turns * seconds_of(own, costs, 1e9), rel=0.01)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_half.main(["--models", "bert"])
    assert refusal.value.code == 2
    assert "invalid choice: 'bert'" in capsys.readouterr().err


def test_what_a_kill_costs_a_survivor_that_trains_alone() -> None:
    together = [Line(rank, update, rank, float(update), update - 1, 2) for update in (1, 2, 3) for rank in (0, 1)]
    ended_with_victim, alone = Line(0, 4, 0, 10.1, 3, 2), [Line(0, 5, 0, 11.0, 5, 1), Line(0, 6, 0, 11.1, 6, 1)]
    lines = [*together, ended_with_victim, *alone]  # the batch at 4 was in an update that is not committed
    assert bench_recovery.find_whole(lines, {1}) is None
    lines += [Line(1, 7, 2, 13.0, 3, 2), Line(0, 7, 0, 12.9, 7, 2)]
    assert bench_recovery.find_whole(lines, {1}) == 7
    found = bench_recovery.result_of(lines, 10.0, 7)
    assert found == (1.0, 3.0, (1 + 4) * bench_recovery.BATCH, 0)


def test_what_a_kill_costs_if_all_processes_go_back_to_a_checkpoint() -> None:
    old = [Line(rank, update, rank, float(update), update - 1, 2) for update in (1, 2, 3, 4) for rank in (0, 1)]
    new = [Line(rank, update, 2 + rank, 17.0 + update, update - 1, 2) for update in (3, 4, 5) for rank in (0, 1)]
    assert bench_recovery.find_whole([*old, *new[:4]], {0, 1}) is None
    assert bench_recovery.find_whole([*old, *new], {0, 1}) == 5
    assert bench_recovery.result_of([*old, *new], 10.0, 5) == (12.0, 12.0, 0, 2)


def test_errors_are_in_units_of_the_last_place_of_the_largest_value() -> None:
    expected = [torch.tensor([1.5, 0.0]), torch.tensor([4.0])]
    found = [torch.tensor([1.5, 2.0**-10]), torch.tensor([4.0 - 2.0**-7])]
    assert bench_half.summary(found, expected) == "1 / 1 / 2"


def test_the_start_up_time_of_a_run_is_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["startup_table.py", str(tmp_path / "a")])
    assert startup_table.main() == 0
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    rows = {name: cells for _, name, *cells, _ in lines}
    assert (rows["step"], rows["start the instances"]) == (["a"], ["4.00 s"])
    assert (rows["everything else"], rows["total"]) == (["1.00 s"], ["5.00 s"])
    assert rows["until the first update"] == ["6.50 s"]
    (tmp_path / "a" / "events.jsonl").write_text("")
    assert startup_table.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run_started" in line
