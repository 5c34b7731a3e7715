"""Sizes, segments and names of a plan, and what is rejected before a run."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from raypod.errors import ConfigError
from raypod.plan.cluster import cluster_of
from raypod.plan.config import Config
from raypod.plan.plan import Geometry, Plan, default_run_dir, make_plan
from raypod.plan.resolve import from_values
from raypod.training.tasks.registry import facts_of

ACCUMULATION, ONE_IPU = "gradient_accumulation", {"ipus_per_replica": 1}
THREE_STAGES = {ACCUMULATION: 3, "pipeline_splits": "features.3,features.5"}


@pytest.mark.parametrize(
    ("geometry", "combined", "total", "samples", "calls"),
    [
        (Geometry(16, 8, 1, 18, 57, 1), 2052, 16416, 1281167, 78),  # ResNet-50 on ImageNet: POD16, POD4, POD64
        (Geometry(4, 2, 1, 18, 228, 1), 8208, 16416, 1281167, 78),
        (Geometry(64, 32, 1, 18, 14, 1), 504, 16128, 1281167, 79),
        (Geometry(4, 4, 1, 10, 1, 1), 10, 40, 150, 3),
        (Geometry(2, 1, 1, 2, 2, 3), 24, 8, 100, 4),
    ],
)
def test_a_geometry(geometry: Geometry, combined: int, total: int, samples: int, calls: int) -> None:
    assert (geometry.combined_batch_size, geometry.global_batch_size) == (combined, total)
    assert geometry.samples_per_call == total * geometry.device_iterations
    assert geometry.calls_per_epoch(samples) == calls
    assert geometry.updates_per_epoch(samples) == calls * geometry.device_iterations


@pytest.mark.parametrize(
    ("sizes", "words"),
    [((6, 4, 1, 8, 1, 1), "6 replicas .* 4 instances"), ((4, 2, 1, 8, 0, 1), "gradient_accumulation = 0")],
)
def test_a_geometry_is_checked(sizes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Geometry(*sizes)


@pytest.mark.parametrize(
    ("pod", "words", "passing"),
    [
        ({"replicas": 10}, "10 replicas cannot .* between 3 instances; use --replicas 6$", {"replicas": 6}),
        ({"replicas": 1000}, "between 3 instances; use --replicas 192$", {"replicas": 192}),
        ({"replicas": 1}, "1 replica cannot .* between 3 instances; --num-instances can be 1$", {"num_instances": 1}),
        ({"replicas": 2}, "2 replicas cannot .*; --num-instances can be 1, 2$", {"num_instances": 2}),
        # 4 are not divisible between the hosts.
        ({"replicas": 8}, "--num-instances can be 1, 2$", {"num_instances": 2}),
        ({"replicas": 12, "num_instances": 2}, "6 IPUs, .* can be 3, 6, 12$", {"num_instances": 12}),
        ({"replicas": 10, "ipus_per_replica": 3}, "10 replicas .* between 3 instances$", {"replicas": 12, **ONE_IPU}),
    ],
)
def test_only_values_that_pass_are_offered(pod: Dict[str, object], words: str, passing: Dict[str, object]) -> None:
    def planned(**changed: object) -> Plan:
        config = from_values({"pod": {"num_instances": 3, **pod, **changed}, "training": {"batch_size": 1}})
        return make_plan(config, cluster_of("a,b,c"), facts_of(config), "run")

    with pytest.raises(ConfigError, match=words):
        planned()
    assert planned(**passing).geometry.total_replicas


@pytest.mark.parametrize("first", [0, 44, 50])
def test_segments_contain_every_update_once(make: Any, first: int) -> None:
    plan = make(training={"epochs": 3, "updates": 100})
    updates = [
        segment.first_update + offset for segment in plan.segments(first) for offset in range(segment.num_updates)
    ]
    assert updates == list(range(first, 100))
    assert [segment.ends_epoch for segment in plan.segments()] == [True, True, False]


@pytest.mark.parametrize(
    ("training", "pod", "words"),
    [
        ({"batch_size": 500}, {}, r"500 .* x 1 .* x 1 .* x 4 .* = 2000 samples.* has 1437"),
        ({"updates": 10, "device_iterations": 4}, {}, "use 8 or 12"),
        ({ACCUMULATION: 2}, {"ipus_per_replica": 2}, r"2 stages needs at least 3 = 2 x 2 - 1 .* is 2"),
        (
            {ACCUMULATION: 7, "evaluation_iterations": 3},
            {"ipus_per_replica": 4},
            "4 stages .* is 3: omit it, or use 4 or",
        ),
        ({ACCUMULATION: 9}, {"ipus_per_replica": 3}, "2 replicas x 3 IPUs = 6 IPUs, .* a power of two"),
        ({}, {"replicas": 6, "num_instances": 2}, "3 IPUs, .* --num-instances can be 3, 6"),
        (THREE_STAGES, {"ipus_per_replica": 2}, "3 stages, and --ipus-per-replica is 2: use .* 3, or 1 splits"),
        ({ACCUMULATION: 5, "pipeline_splits": "features.3=2"}, {"ipus_per_replica": 2}, "has stages on the IPUs 0, 2,"),
        (
            {ACCUMULATION: 4, "pipeline_splits": "features.3,head=0"},
            {"ipus_per_replica": 2},
            "3 stages needs at least 5 = 2 x 3 - 1",
        ),
        ({"layers_per_ipu": "1,1", "pipeline_balance": "time"}, {"ipus_per_replica": 2}, "both choose the stages"),
        ({"layers_per_ipu": "1,1,1", ACCUMULATION: 3}, {"ipus_per_replica": 2}, "3 numbers, and .* is 2"),
        ({"lr_schedule": "step"}, {}, "--lr-steps .* must be given together"),
        ({"lr_steps": "3"}, {}, "--lr-schedule step"),
        ({"model": "vit_tiny", "norm": "group"}, {}, "vit_tiny has none"),
    ],
)
def test_settings_without_a_meaning_are_errors(make: Any, training: Any, pod: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(training=training, pod=pod)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pod": {"num_instances": 2}}, "--num-instances 1"),
        ({"pod": {"num_instances": 1, "bind_cores": True}}, "--bind-cores has no effect with --fleet inline"),
        ({"run": {"snapshot_every": 2}}, "--snapshot-every has no effect with --fleet inline"),
        ({"run": {"standby": 1}}, "--standby has no effect with --fleet inline"),
        ({"run": {"standby": 1, "max_restarts": 0, "fleet": "ray"}}, "--standby 1 has no effect with --max-restarts 0"),
        ({"run": {"reset_command": "reset"}}, "--reset-command has no effect with --fleet inline"),
        *(
            ({"data": {"dataset": name, "data_dir": "/images"}}, f"--data-dir has no effect on {rest}")
            for name in ("digits", "synthetic")
            for rest in [f"--dataset {name}: omit it, or add --dataset imagefolder for a folder"]
        ),
    ],
)
def test_settings_without_effect_on_an_inline_run_are_errors(make: Any, sections: Any, words: str) -> None:
    run = {"fleet": "inline", **sections.get("run", {})}
    with pytest.raises(ConfigError, match=words):
        make(**{"pod": {"num_instances": 1}, **sections, "run": run})


def test_a_reset_must_end_before_the_request_for_it(make: Any) -> None:
    with pytest.raises(ConfigError, match="--reset-timeout-s 300 must be below --report-timeout-s 60"):
        make(run={"reset_command": "reset", "report_timeout_s": 60})


def test_evaluation_iterations_default_to_the_pipeline_stages(make: Any) -> None:
    pipelined = make(training={ACCUMULATION: 7}, pod={"ipus_per_replica": 4}).geometry
    assert (pipelined.evaluation_iterations, pipelined.evaluation_batch_size) == (4, 8 * 2 * 4)
    sharded = make(training={"execution": "sharded"}, pod={"ipus_per_replica": 4}).geometry
    assert sharded.evaluation_iterations == 1


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
def test_names_of_files_and_of_the_model(sections: Any, run_dir: str, model: str) -> None:
    config = Config(**sections)
    assert (default_run_dir(config, "now"), config.model_name) == (run_dir, model)
