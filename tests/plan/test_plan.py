from __future__ import annotations

import json
import subprocess
import sys
from typing import Callable

import pytest

from raypod.errors import ClusterError, ConfigError
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import DatasetSize, Geometry, Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.plan.tables import describe, render

IMAGENET = 1281167


@pytest.mark.parametrize(
    ("replicas", "instances", "accumulation", "combined", "total", "calls"),
    [(16, 8, 57, 2052, 16416, 78), (4, 2, 228, 8208, 16416, 78), (64, 32, 14, 504, 16128, 79)],
    ids=["POD16", "POD4", "POD64"],
)
def test_worked_numbers_of_the_contract(
    replicas: int, instances: int, accumulation: int, combined: int, total: int, calls: int
) -> None:
    geometry = Geometry(replicas, instances, 1, 18, accumulation, 1)
    assert geometry.combined_batch_size == combined
    assert geometry.global_batch_size == total
    assert geometry.calls_per_epoch(IMAGENET) == calls


def test_the_toy_of_the_contract() -> None:
    geometry = Geometry(4, 4, 1, 10, 1, 1)
    assert (geometry.combined_batch_size, geometry.global_batch_size, geometry.calls_per_epoch(150)) == (10, 40, 3)


def test_updates_come_in_whole_calls() -> None:
    geometry = Geometry(2, 1, 1, 2, 2, 3)
    assert geometry.samples_per_call == 24
    assert geometry.updates_per_epoch(100) == 12


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 4, 1, 8, 1, 1), ["6 replicas", "4 instances", "1, 2, 3, 6"]),
        ((64, 1, 2, 8, 1, 1), ["64 replicas x 2", "128", "--num-instances 2"]),
        ((4, 2, 1, 8, 0, 1), ["gradient_accumulation", "0"]),
    ],
)
def test_geometry_is_checked_at_birth(sizes: tuple[int, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Geometry(*sizes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_global_batch_larger_than_the_data_says_the_numbers(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"500 .* x 1 .* x 1 .* x 4 .* = 2000 samples.* has 1437"):
        make(training={"batch_size": 500})


def test_updates_that_are_no_whole_calls_name_the_next_ones(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match="use 8 or 12"):
        make(training={"updates": 10, "device_iterations": 4})


def test_inline_refuses_several_instances(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match="--num-instances 1"):
        make(run={"fleet": "inline"}, pod={"num_instances": 2})


@pytest.mark.parametrize("first", [0, 44, 50])
def test_legs_cover_every_update_once(make: Callable[..., Plan], first: int) -> None:
    plan = make(training={"epochs": 3, "updates": 100})
    updates = [leg.first_update + offset for leg in plan.legs(first) for offset in range(leg.num_updates)]
    assert updates == list(range(first, 100))
    assert [leg.ends_epoch for leg in plan.legs()] == [True, True, False]


def pod(hosts: int, ipus: int) -> Cluster:
    return Cluster("pod", tuple(Host(f"h{index}", f"10.0.0.{index}", ipus, 4) for index in range(hosts)))


def test_instances_follow_the_hosts_in_order() -> None:
    config = from_values({"pod": {"replicas": 8, "num_instances": 4, "threads_per_replica": 0}})
    plan = make_plan(config, pod(2, 16), DatasetSize(1000, 10), "run")
    assert [(s.host, s.local_index, s.replica_offset) for s in plan.placement.instances] == [
        ("h0", 0, 0),
        ("h0", 1, 2),
        ("h1", 0, 4),
        ("h1", 1, 6),
    ]
    assert {spec.threads_per_replica for spec in plan.placement.instances} == {1}  # 4 cores for 4 replicas on each host


def test_more_ipus_than_a_host_has_is_refused_by_name() -> None:
    config = from_values(
        {"pod": {"replicas": 16, "num_instances": 2, "ipus_per_replica": 4}, "training": {"model": "own:build"}}
    )
    with pytest.raises(ClusterError, match="host h0 of pod has 16 IPUs and the plan puts 32 on it"):
        make_plan(config, pod(2, 16), DatasetSize(1000, 10), "run")


def test_instances_that_do_not_spread_evenly_are_refused() -> None:
    config = from_values({"pod": {"replicas": 6, "num_instances": 3}})
    with pytest.raises(ConfigError, match="3 instances cannot be spread evenly over the 2 hosts"):
        make_plan(config, pod(2, 16), DatasetSize(1000, 10), "run")


def test_the_plan_prints_every_product(make: Callable[..., Plan]) -> None:
    plan = make(pod={"replicas": 8})
    described = json.loads(json.dumps(describe(plan)))
    assert described["geometry"]["global_batch_size"] == 64
    assert "8 (micro-batch) x 1 (accumulation) x 8 (replicas) = 64 samples per update" in render(plan)


@pytest.mark.parametrize("command", [["raypod", "plan"], ["raypod", "plan", "--json"], ["raypod.train", "--dry-run"]])
def test_planning_imports_neither_ray_nor_torch_nor_an_sdk(command: list[str]) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = {command!r}\n"
        "try:\n    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "loaded = {'ray', 'torch', 'poptorch', 'popdist', 'horovod'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "replicas" in done.stdout


@pytest.mark.parametrize(
    ("training", "pod", "words"),
    [
        ({"gradient_accumulation": 2}, {"ipus_per_replica": 2}, r"2 stages is filled by 3 = 2 x 2 - 1 .* is 2"),
        (
            {"gradient_accumulation": 7, "evaluation_iterations": 3},
            {"ipus_per_replica": 4},
            "4 stages .* --evaluation-iterations is 3: leave it out, or use 4 or more",
        ),
        ({"gradient_accumulation": 9}, {"ipus_per_replica": 3}, "2 replicas x 3 IPUs = 6 IPUs, .* a power of two"),
        ({}, {"replicas": 6, "num_instances": 2}, "3 IPUs, .* --num-instances can be 3, 6"),
        (
            {"gradient_accumulation": 3, "pipeline_splits": "features.3,features.5"},
            {"ipus_per_replica": 2},
            "makes 3 stages, and --ipus-per-replica is 2: use --ipus-per-replica 3, or 1 splits",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_with_its_numbers(
    make: Callable[..., Plan], training: dict[str, object], pod: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(training=training, pod=pod)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"lr_schedule": "step"}, "--lr-steps .* go together"),
        ({"lr_steps": "3"}, "--lr-schedule step"),
        ({"model": "vit_tiny", "norm": "group"}, "vit_tiny has none"),
    ],
)
def test_a_choice_that_says_nothing_is_refused(
    make: Callable[..., Plan], training: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(training=training)


def test_evaluation_fills_the_pipeline_and_sharding_asks_for_nothing(make: Callable[..., Plan]) -> None:
    pod: dict[str, object] = {"ipus_per_replica": 4}
    piped = make(training={"gradient_accumulation": 7}, pod=pod).geometry
    assert (piped.evaluation_iterations, piped.evaluation_batch_size) == (4, 8 * 2 * 4)
    assert make(training={"execution": "sharded"}, pod=pod).geometry.evaluation_iterations == 1
