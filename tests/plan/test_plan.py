from __future__ import annotations

from typing import Callable

import pytest

from raypod.errors import ConfigError
from raypod.plan.cluster import cluster_of
from raypod.plan.config import Config
from raypod.plan.plan import Geometry, Plan, default_run_dir, make_plan
from raypod.plan.resolve import from_values
from raypod.tasks.registry import facts_of

IMAGENET = 1281167


@pytest.mark.parametrize(
    ("replicas", "instances", "accumulation", "combined", "total", "calls"),
    [(16, 8, 57, 2052, 16416, 78), (4, 2, 228, 8208, 16416, 78), (64, 32, 14, 504, 16128, 79)],
    ids=["POD16", "POD4", "POD64"],
)
def test_the_sizes_of_resnet50_on_imagenet(
    replicas: int, instances: int, accumulation: int, combined: int, total: int, calls: int
) -> None:
    geometry = Geometry(replicas, instances, 1, 18, accumulation, 1)
    assert geometry.combined_batch_size == combined
    assert geometry.global_batch_size == total
    assert geometry.calls_per_epoch(IMAGENET) == calls


def test_a_geometry_of_one_replica_per_instance() -> None:
    geometry = Geometry(4, 4, 1, 10, 1, 1)
    assert (geometry.combined_batch_size, geometry.global_batch_size, geometry.calls_per_epoch(150)) == (10, 40, 3)


def test_an_epoch_has_whole_calls() -> None:
    geometry = Geometry(2, 1, 1, 2, 2, 3)
    assert geometry.samples_per_call == 24
    assert geometry.updates_per_epoch(100) == 12


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 4, 1, 8, 1, 1), "6 replicas .* 4 instances"),
        ((4, 2, 1, 8, 0, 1), "gradient_accumulation = 0"),
    ],
)
def test_a_geometry_is_checked(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Geometry(*sizes)


def test_a_global_batch_larger_than_the_data_is_an_error(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match=r"500 .* x 1 .* x 1 .* x 4 .* = 2000 samples.* has 1437"):
        make(training={"batch_size": 500})


def test_updates_must_be_whole_calls(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match="use 8 or 12"):
        make(training={"updates": 10, "device_iterations": 4})


def test_the_inline_fleet_has_one_instance(make: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match="--num-instances 1"):
        make(run={"fleet": "inline"}, pod={"num_instances": 2})


@pytest.mark.parametrize(
    ("pod", "words", "passing"),
    [
        ({"replicas": 10}, "10 replicas cannot .* between 3 instances; use --replicas 6$", {"replicas": 6}),
        ({"replicas": 1000}, "between 3 instances; use --replicas 192$", {"replicas": 192}),
        (
            {"replicas": 1},
            "1 replica cannot be divided equally between 3 instances; --num-instances can be 1$",
            {"num_instances": 1},
        ),
        ({"replicas": 2}, "2 replicas cannot .*; --num-instances can be 1, 2$", {"num_instances": 2}),
        (
            {"replicas": 8},
            "--num-instances can be 1, 2$",
            {"num_instances": 2},
        ),  # 4 are not divisible between the hosts
        (
            {"replicas": 12, "num_instances": 2},
            "6 IPUs, and PopTorch .*; --num-instances can be 3, 6, 12$",
            {"num_instances": 12},
        ),
        (
            {"replicas": 10, "ipus_per_replica": 3},
            "10 replicas cannot be divided equally between 3 instances$",
            {"replicas": 12, "ipus_per_replica": 1},
        ),
    ],
)
def test_only_values_that_pass_are_offered(pod: dict[str, object], words: str, passing: dict[str, object]) -> None:
    def planned(**changed: object) -> Plan:
        config = from_values({"pod": {"num_instances": 3, **pod, **changed}, "training": {"batch_size": 1}})
        return make_plan(config, cluster_of("a,b,c"), facts_of(config), "run")

    with pytest.raises(ConfigError, match=words):
        planned()
    assert planned(**passing).geometry.total_replicas


@pytest.mark.parametrize("first", [0, 44, 50])
def test_legs_contain_every_update_once(make: Callable[..., Plan], first: int) -> None:
    plan = make(training={"epochs": 3, "updates": 100})
    updates = [leg.first_update + offset for leg in plan.legs(first) for offset in range(leg.num_updates)]
    assert updates == list(range(first, 100))
    assert [leg.ends_epoch for leg in plan.legs()] == [True, True, False]


@pytest.mark.parametrize(
    ("training", "pod", "words"),
    [
        ({"gradient_accumulation": 2}, {"ipus_per_replica": 2}, r"2 stages needs at least 3 = 2 x 2 - 1 .* is 2"),
        (
            {"gradient_accumulation": 7, "evaluation_iterations": 3},
            {"ipus_per_replica": 4},
            "4 stages .* --evaluation-iterations is 3: omit it, or use 4 or more",
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
def test_a_pipeline_that_poptorch_would_reject_is_an_error(
    make: Callable[..., Plan], training: dict[str, object], pod: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(training=training, pod=pod)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"lr_schedule": "step"}, "--lr-steps .* must be given together"),
        ({"lr_steps": "3"}, "--lr-schedule step"),
        ({"model": "vit_tiny", "norm": "group"}, "vit_tiny has none"),
    ],
)
def test_a_setting_without_effect_is_an_error(
    make: Callable[..., Plan], training: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(training=training)


def test_evaluation_iterations_default_to_the_pipeline_stages(make: Callable[..., Plan]) -> None:
    pod: dict[str, object] = {"ipus_per_replica": 4}
    pipelined = make(training={"gradient_accumulation": 7}, pod=pod).geometry
    assert (pipelined.evaluation_iterations, pipelined.evaluation_batch_size) == (4, 8 * 2 * 4)
    assert make(training={"execution": "sharded"}, pod=pod).geometry.evaluation_iterations == 1


@pytest.mark.parametrize(
    ("sections", "run_dir", "model"),
    [
        ({}, "runs/now-digits-resnet8", "resnet8"),
        ({"data": {"dataset": "a:b"}, "training": {"model": "c.d:e"}}, "runs/now-b-e", "c.d:e"),
        ({"task": {"name": "language-model"}}, "runs/now-language-model", "language-model"),
        ({"task": {"name": "own:Task"}}, "runs/now-Task", "own:Task"),
        ({"run": {"run_dir": "here"}}, "here", "resnet8"),
    ],
)
def test_names_of_files_and_of_the_model(sections: dict[str, dict[str, object]], run_dir: str, model: str) -> None:
    config = Config(**sections)  # type: ignore[arg-type]
    assert (default_run_dir(config, "now"), config.model_name) == (run_dir, model)
