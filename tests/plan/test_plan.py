"""Sizes, placement, variables and tables of a plan, what is rejected before a run, and plans with fewer replicas."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.errors import ClusterError, ConfigError, RaypodError
from raypod.plan import flags, layout, resolve
from raypod.plan.cluster import LOCAL, Cluster, Host, VipuPartition, cluster_of
from raypod.plan.config import Config
from raypod.plan.elastic import Room, largest_fit, sizes_of, smaller_plans
from raypod.plan.environment import device_environment
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
from raypod.plan.plan import DatasetSize, Geometry, Plan, TaskFacts, default_run_dir, make_plan
from raypod.plan.resolve import from_values
from raypod.plan.tables import describe, render, render_brief, render_topology
from raypod.runtime.worker.environment import instance_environment
from raypod.system.command_line import FlagParser
from raypod.training.data.order import call_positions
from raypod.training.tasks.registry import facts_of
from tests.support import ROOT
from tests.support.refused import refused

ACCUMULATION = "gradient_accumulation"
ONE_IPU, TWO_IPUS, FOUR_IPUS = ({"ipus_per_replica": number} for number in (1, 2, 4))
OMIT = ": omit it, or add --dataset imagefolder for a folder"
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
    for sizes, words in (
        ((6, 4, 1, 8, 1, 1), "6 replicas .* 4 instances"),
        ((4, 2, 1, 8, 0, 1), f"{ACCUMULATION} = 0"),
    ):
        refused(words, Geometry, *sizes)


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

    refused(words, planned)
    assert planned(**passing).geometry.total_replicas


def test_segments_contain_every_update_once_and_evaluation_iterations_default_to_the_stages(make: Any) -> None:
    for first in (0, 44, 50):
        plan = make(training={"epochs": 3, "updates": 100})
        updates = [range(each.first_update, each.first_update + each.num_updates) for each in plan.segments(first)]
        assert [update for each in updates for update in each] == list(range(first, 100))
        assert [segment.ends_epoch for segment in plan.segments()] == [True, True, False]
    pipelined = make(training={ACCUMULATION: 7}, pod=FOUR_IPUS).geometry
    assert (pipelined.evaluation_iterations, pipelined.evaluation_batch_size) == (4, 8 * 2 * 4)
    sharded = make(training={"execution": "sharded"}, pod=FOUR_IPUS).geometry
    assert sharded.evaluation_iterations == 1


@pytest.mark.parametrize(
    ("training", "pod", "words"),
    [
        ({"batch_size": 500}, {}, r"500 .* x 1 .* x 1 .* x 4 .* = 2000 samples.* has 1437"),
        ({"updates": 10, "device_iterations": 4}, {}, "use 8 or 12"),
        ({ACCUMULATION: 2}, TWO_IPUS, r"2 stages needs at least 3 = 2 x 2 - 1 .* is 2"),
        ({ACCUMULATION: 7, "evaluation_iterations": 3}, FOUR_IPUS, "4 stages .* is 3: omit it, or use 4 or"),
        ({ACCUMULATION: 9}, {"ipus_per_replica": 3}, "2 replicas x 3 IPUs = 6 IPUs, .* a power of two"),
        ({}, {"replicas": 6, "num_instances": 2}, "3 IPUs, .* --num-instances can be 3, 6"),
        (THREE_STAGES, TWO_IPUS, "3 stages, and --ipus-per-replica is 2: use .* 3, or 1 split$"),
        ({ACCUMULATION: 5, "pipeline_splits": "features.3=2"}, TWO_IPUS, "has stages on the IPUs 0, 2,"),
        ({ACCUMULATION: 4, "pipeline_splits": "features.3,head=0"}, TWO_IPUS, "3 stages needs at least 5 = 2 x 3 - 1"),
        ({"layers_per_ipu": "1,1", "pipeline_balance": "time"}, TWO_IPUS, "both choose the stages"),
        ({"layers_per_ipu": "1,1,1", ACCUMULATION: 3}, TWO_IPUS, "3 numbers, and .* is 2"),
        ({"lr_schedule": "step"}, {}, "--lr-steps .* must be given together"),
        ({"lr_steps": "3"}, {}, "--lr-schedule step"),
        ({"model": "vit_tiny", "norm": "group"}, {}, "vit_tiny has none"),
    ],
)
def test_settings_without_a_meaning_are_errors(make: Any, training: Any, pod: Any, words: str) -> None:
    refused(words, make, training=training, pod=pod)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"pod": {"num_instances": 2}}, "--num-instances 1"),
        ({"pod": {"num_instances": 1, "bind_cores": True}}, "--bind-cores has no effect with --fleet inline"),
        ({"run": {"snapshot_every": 2}}, "--snapshot-every has no effect with --fleet inline"),
        ({"run": {"standby": 1}}, "--standby has no effect with --fleet inline"),
        ({"run": {"standby": 1, "max_restarts": 0, "fleet": "ray"}}, "--standby 1 has no effect with --max-restarts 0"),
        ({"run": {"reset_command": "reset"}}, "--reset-command has no effect with --fleet inline"),
        ({"data": {"data_dir": "/x"}}, f"--data-dir has no effect on --dataset digits{OMIT}"),
        (
            {"data": {"dataset": "synthetic", "data_dir": "/x"}},
            f"--data-dir has no effect on --dataset synthetic{OMIT}",
        ),
    ],
)
def test_settings_without_effect_on_an_inline_run_are_errors(make: Any, sections: Any, words: str) -> None:
    run = {"fleet": "inline", **sections.get("run", {})}
    refused(words, make, **{"pod": {"num_instances": 1}, **sections, "run": run})
    with pytest.raises(ConfigError, match="--reset-timeout-s 300 must be below --report-timeout-s 60"):
        make(run={"reset_command": "reset", "report_timeout_s": 60})


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


def pod(hosts: int, ipus: int | None = None, slots: int | None = None) -> Cluster:
    return Cluster("pod", tuple(Host(f"h{index}", f"10.0.0.{index}", ipus, 4, slots) for index in range(hosts)))


def placed(hosts: int, replicas: int, instances: int, ipus: int) -> Placement:
    return place(pod(hosts), Sizes(replicas, instances, ipus))


def test_instances_follow_the_hosts_in_order_with_device_ids_and_sizes_that_are_checked() -> None:
    placement = place(pod(2, 16), Sizes(8, 4, 1), threads_per_replica=0)
    found = [(spec.host, spec.local_index, spec.replica_offset) for spec in placement.instances]
    assert found == [("h0", 0, 0), ("h0", 1, 2), ("h1", 0, 4), ("h1", 1, 6)]
    assert {spec.threads_per_replica for spec in placement.instances} == {1}  # 4 cores for 4 replicas on each host
    with pytest.raises(ClusterError, match="host h0 of pod has 16 IPUs and the plan puts 32 on it"):
        place(pod(2, 16), Sizes(16, 2, 4))
    hosts = "3 instances cannot be divided equally between the 2 hosts of pod; --num-instances can be 6$"
    refused(hosts, placed, 2, 6, 3, 1)
    refused("6 replicas .* 4 instances; .* 1, 2, 3, 6", Sizes, 6, 4, 1)
    refused("64 replicas x 2 .* 128 IPUs.*instances 2", Sizes, 64, 1, 2)
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


def plan_on(hosts: int, replicas: int, instances: Optional[int] = None, **training: Any) -> Plan:
    """A plan whose hosts are named a, b, c, ..."""
    cluster = Cluster("pod", tuple(Host(name, name) for name in "abcdefghijklmnop"[:hosts]))
    config = from_values({"training": training, "pod": {"replicas": replicas, "num_instances": instances or hosts}})
    return make_plan(config, cluster, TaskFacts(DatasetSize(20_000, 0)), "run")


def rooms(names: str, replicas: int) -> List[Room]:
    return [Room(name, replicas) for name in names]


def hosts_of(plan: Plan) -> str:
    return "".join(host.name for host in plan.placement.hosts)


@pytest.mark.parametrize(
    ("hosts", "replicas", "left", "expected"),
    [
        (2, 4, "ab", (4, 1, "ab")),
        (2, 4, "a", (2, 2, "a")),
        (2, 4, "b", (2, 2, "b")),
        (4, 4, "abd", (2, 2, "ab")),
        (4, 8, "acd", (4, 2, "ac")),
        (4, 8, "d", (2, 4, "d")),
        (8, 8, "abcdefg", (4, 2, "abcd")),
        (3, 6, "ac", (2, 3, "ac")),  # 6 micro-batches cannot be divided between 4 replicas
        (3, 3, "ab", (1, 3, "a")),
        (1, 1, "a", (1, 1, "a")),
    ],
)
def test_the_largest_power_of_two_continues(hosts: int, replicas: int, left: str, expected: Any) -> None:
    full = plan_on(hosts, replicas)
    plan = largest_fit(full, rooms(left, replicas // hosts))
    assert (*sizes_of(plan), hosts_of(plan)) == expected
    assert plan.geometry.global_batch_size == full.geometry.global_batch_size
    assert plan.geometry.samples_per_call == full.geometry.samples_per_call
    assert (plan.total_updates, plan.updates_per_epoch) == (full.total_updates, full.updates_per_epoch)
    assert sorted(host.name for host in plan.placement.cluster.hosts) == list("abcdefgh"[:hosts])
    assert (plan.config.pod.replicas, plan.config.training.gradient_accumulation) == sizes_of(plan)


def test_accumulation_instances_and_room_limit_the_replicas_with_which_a_run_continues() -> None:
    assert sizes_of(largest_fit(plan_on(3, 6, gradient_accumulation=2), rooms("ac", 2))) == (4, 3)
    plan = largest_fit(plan_on(2, 8, instances=4), rooms("b", 4))  # several instances of a host stay several
    assert [(spec.host, spec.local_replicas) for spec in plan.placement.instances] == [("b", 2), ("b", 2)]
    full = plan_on(2, 4)
    plan = largest_fit(full, rooms("b", 4))  # a host with more room takes all replicas
    assert (sizes_of(plan), hosts_of(plan), plan.geometry.num_instances) == (sizes_of(full), "b", 2)
    plan = largest_fit(plan_on(4, 8), [Room("a", 1), Room("b", 2), Room("d", 2)])  # a host without enough is left out
    assert (sizes_of(plan), hosts_of(plan)) == ((4, 2), "bd")
    plans = smaller_plans(plan_on(4, 8))
    assert [(*sizes_of(plan), hosts_of(plan)) for plan in plans] == [(4, 2, "ab"), (2, 4, "a")]
    assert smaller_plans(plan_on(1, 4)) == []
    pod = {"replicas": 8, "num_instances": 4, "min_hosts": 2}
    limited = dataclasses.replace(plan_on(4, 8), config=from_values({"pod": pod}))
    assert "elastic  while hosts are lost: 4 replicas x 2 (accumulation) on 2 hosts\n" in render(limited)
    assert "elastic" not in render(plan_on(4, 8))


def test_without_room_the_error_names_the_hosts_and_graph_compile_domains_limit_the_instances() -> None:
    full = plan_on(2, 4)
    partition = VipuPartition("p", gcds=2)
    cluster = dataclasses.replace(full.placement.cluster, vipu=partition)
    full = dataclasses.replace(full, placement=dataclasses.replace(full.placement, cluster=cluster))
    assert sizes_of(largest_fit(full, rooms("a", 2))) == (2, 2)
    refused("partition p has 2 GCDs and the run 1 instance", largest_fit, full, rooms("a", 2), uses_partition=True)
    for room in ([], rooms("a", 0)):
        with pytest.raises(ConfigError, match=r"can continue on the hosts that respond: (none|a \(0\))$") as caught:
            largest_fit(plan_on(2, 4), room)
        assert "\n" not in str(caught.value)


def samples_of_update(plan: Plan, update: int) -> List[List[int]]:
    """The positions of each micro-batch of an update, in the order of the accumulation step and the replica."""
    geometry = plan.geometry
    call, of_call = divmod(update, geometry.device_iterations)
    shape = (geometry.device_iterations, geometry.gradient_accumulation, geometry.local_replicas, -1)
    instances = range(geometry.num_instances)
    parts = [call_positions(geometry, instance, call).reshape(shape)[of_call] for instance in instances]
    return np.concatenate(parts, axis=1).reshape(-1, geometry.micro_batch_size).tolist()


@given(
    of=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4])),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    left=st.integers(1, 8),
    update=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_update_has_the_same_micro_batches_in_the_same_order(of: Any, sizes: Any, left: int, update: int) -> None:
    (hosts, per_host), names = of, ("batch_size", "gradient_accumulation", "device_iterations")
    full = plan_on(hosts, hosts * per_host, **dict(zip(names, sizes)))
    plan = largest_fit(full, rooms("abcdefgh"[: min(left, hosts)], per_host))
    assert plan.geometry.total_replicas == per_host * max(1 << k for k in range(4) if 1 << k <= min(left, hosts))
    assert samples_of_update(plan, update) == samples_of_update(full, update)


def test_the_reports_of_popvision_have_a_folder_for_each_instance(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"opt.a": "b"}')
    plan = make(ipu={"ipu_profile": "/data/reports/"})
    (first, second) = (instance_environment(plan, spec) for spec in plan.placement.instances)
    assert float(first["EMULATED_POD_TIMEOUT_S"]) >= plan.config.run.report_timeout_s + 10  # the coordinator is first
    of_first = {"opt.a": "b", "autoReport.all": "true", "autoReport.directory": "/data/reports/instance-0"}
    assert json.loads(first["POPLAR_ENGINE_OPTIONS"]) == of_first
    assert "instance-1" in second["POPLAR_ENGINE_OPTIONS"]
    assert "POPLAR_ENGINE_OPTIONS" not in instance_environment(make(), plan.placement.instances[0])
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "opt.a=b")
    with pytest.raises(ConfigError, match="POPLAR_ENGINE_OPTIONS=opt.a=b is not a JSON object"):
        instance_environment(plan, plan.placement.instances[0])


def test_the_variables_are_those_of_poprun_and_depend_only_on_the_plan(make: Any) -> None:
    pod = {"replicas": 8, "num_instances": 4, "ipus_per_replica": 2}
    config = from_values({"pod": pod, "training": {"model": "own:build", "gradient_accumulation": 3}})
    hosts = tuple(Host(f"h{index}", f"10.0.0.{index}") for index in range(2))
    plan = make_plan(config, Cluster("pod", hosts), TaskFacts(DatasetSize(1000, 10)), "run")
    env = [instance_environment(plan, spec) for spec in plan.placement.instances]
    for name, values in {
        "POPDIST_REPLICA_INDEX_OFFSET": "0246",
        "POPDIST_LOCAL_INSTANCE_INDEX": "0101",
        "POPDIST_NUM_TOTAL_REPLICAS": "8888",
        "POPDIST_NUM_LOCAL_REPLICAS": "2222",
        "POPDIST_NUM_IPUS_PER_REPLICA": "2222",
        "HOROVOD_RANK": "0123",
        "HOROVOD_CROSS_RANK": "0011",
        "RDMAV_FORK_SAFE": "1111",
    }.items():
        assert [each[name] for each in env] == list(values), name
    plan = make(pod={"threads_per_replica": 3, "executable_cache_path": "/cache"})
    before = dict(os.environ)
    first = instance_environment(plan, plan.placement.instances[1])
    assert first == instance_environment(plan, plan.placement.instances[1])
    assert dict(os.environ) == before
    assert (first["OMP_NUM_THREADS"], first["POPTORCH_CACHE_DIR"]) == ("3", "/cache")
    for words, expected in (([], None), (["--strict"], "1"), (["--no-strict"], "0")):
        parser = FlagParser()
        flags.add_flags(parser)
        plan = make(run={"strict": resolve.resolve(parser.parse_args(words)).run.strict})
        assert instance_environment(plan, plan.placement.instances[1]).get("EMULATED_POD_STRICT") == expected


@pytest.mark.parametrize(("gcds", "expected"), [(4, "0123"), (1, "0000"), (None, "0123")])
def test_the_variables_name_the_gcd_of_an_instance(gcds: Optional[int], expected: str) -> None:
    vipu = VipuPartition("p", server="v", port=9000, gcds=gcds)
    placement = place(Cluster("pod", (Host("h0", "h0"), Host("h1", "h1")), vipu=vipu), Sizes(8, 4, 2))
    found = [device_environment(placement, spec) for spec in placement.instances]
    assert [env["IPUOF_VIPU_API_GCD_ID"] for env in found] == list(expected)
    of_partition = [f"IPUOF_VIPU_API_{name}" for name in ("HOST", "PORT", "PARTITION_ID")]
    assert {tuple(env[name] for name in of_partition) for env in found} == {("v", "9000", "p")}
    without = place(LOCAL, Sizes(2, 2, 1))
    assert device_environment(without, without.instances[0]) == {}


def test_torchvision_is_imported_after_another_sitecustomize(make: Any, tmp_path: Path, processes: None) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.from_the_environment = 42\n")
    plan = make()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **instance_environment(plan, plan.placement.instances[0], paths)}
    program = "import torchvision; print(from_the_environment, torchvision.models.resnet18().fc)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("42 Linear("), done.stderr


def test_the_plan_shows_every_product_the_ipus_in_use_and_a_boxed_table_of_the_topology(make: Any) -> None:
    plan = make(pod={"replicas": 8})
    described = json.loads(json.dumps(describe(plan)))
    assert described["geometry"]["global_batch_size"] == 64
    assert "8 (micro-batch) x 1 (accumulation) x 8 (replicas) = 64 samples per update" in render(plan)
    assert "snapshots" not in render(plan)
    assert "snapshots  every 2 updates: each host keeps two" in render(make(run={"snapshot_every": 2}))
    placement = place(cluster_of("a,b"), Sizes(4, 2, 1))
    assert render_topology(placement, 2).splitlines() == [
        "+------+-----+----------+----------+------+",
        "| host | ILD | instance | replicas | IPUs |",
        "+------+-----+----------+----------+------+",
        "| a    | 0   | 0        | 0..1     | 0..1 |",
        "| b    | 1   | 1        | 2..3     | 2..3 |",
        "+------+-----+----------+----------+------+",
    ]
    hosts = tuple(dataclasses.replace(host, ipus=16) for host in cluster_of("a,b").hosts)
    alone = make()
    cluster = dataclasses.replace(cluster_of("a,b"), hosts=hosts)
    plan = dataclasses.replace(alone, placement=dataclasses.replace(alone.placement, cluster=cluster))
    for text in (render(plan), render_brief(plan)):
        assert "= 4 IPUs of 32" in text
    assert " of " not in render_brief(alone).split("placement")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("raypod plan", "ray torch poptorch numpy"),
        *((command, "ray") for command in ("raypod plan --memory", "raypod plan --json", "raypod.train --dry-run")),
        ("raypod --help", "ray torch numpy pydantic yaml"),
    ],
)
def test_what_a_command_does_not_import(command: str, absent: str, run_python: Any) -> None:
    output = run_python(
        "import runpy, sys\n"
        f"sys.argv = {command.split()!r}\n"
        "try:\n    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        f"found = set({absent.split()!r}) & set(sys.modules)\nassert not found, found\n"
    )
    assert "replica" in output or "usage: raypod COMMAND" in output


def test_the_plan_shows_the_cores_per_replica_and_where_the_weights_are_the_same(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert "8 CPUs per host for 2 replicas: 4 per replica, 1 thread each\n" in render(make(pod={"replicas": 2}))
    sixteen = make(pod={"replicas": 16, "bind_cores": True})
    assert "0.5 per replica, 1 thread each; each instance is bound to its own, by NUMA node\n" in render(sixteen)
    assert "an instance computes 4 of its 8 replicas at a time (emulated SDK)" in render(sixteen)
    many = make(pod={"replicas": 4, "num_instances": 4, "threads_per_replica": 3})
    words = "WARNING, oversubscribed: 4 x 3 threads"
    shared = f"{words} (instances x threads per replica) share the 8 CPUs of a host: "
    assert f"{shared}use at most 2 instances per host or --threads-per-replica 2" in render(many)
    assert words in render_brief(many)
    assert "  cores  " not in render_brief(many)
    shown = render(make(pod={"replicas": 4, "threads_per_replica": 0}))
    assert "2 per replica, 2 threads each" in shown
    assert "specific to this placement: the threads" in shown
    one_thread = render(make(pod={"replicas": 4, "threads_per_replica": 1}))
    assert "the same for every placement of these replicas" in one_thread
    hosts = cluster_of("a,b")
    assert place(hosts, Sizes(4, 4, 1)).cpus_per_host is None
    four = dataclasses.replace(hosts, hosts=tuple(dataclasses.replace(host, cpus=4) for host in hosts.hosts))
    assert place(four, Sizes(4, 4, 1)).oversubscription == ""
    assert place(four, Sizes(16, 16, 1)).oversubscription.endswith("use at most 4 instances per host")
    assert place(four, Sizes(2, 2, 1), 8).oversubscription.endswith("use --threads-per-replica 4")
    assert place(four, Sizes(16, 16, 1), 8).oversubscription.endswith("use fewer of both")


def test_a_plan_shows_samples_that_are_left_out_and_what_evaluations_and_the_average_transfer(make: Any) -> None:
    left_out = "29 of 1437 images left out of each"
    assert f"length  660 updates, 44 per epoch ({left_out}), 15 segments\n" in render(make())
    assert f"length  660 updates (15 epochs of 44; {left_out})\n" in render_brief(make(), 80)
    assert f"length  5 updates, 44 per epoch ({left_out})\n" in render_brief(make(training={"updates": 5}), 80)
    whole = make(data={"dataset": "synthetic", "samples": 64}, training={"epochs": 1, "batch_size": 16})
    assert "length  1 update, 1 per epoch, 1 segment\n" in render(whole)
    assert "length  1 update (1 epoch of 1)\n" in render_brief(whole)
    shown = render(make(training={"epochs": 3}))
    assert "evaluation  after the training; on IPUs it transfers the weights 2 x and the optimizer state 1 x" in shown
    assert "during the training" not in shown
    assert "average" not in shown
    shown = render(make(training={"epochs": 3, "evaluate_every": 1, "ema": 0.99}))
    assert "evaluation  2 times during the training; on IPUs each transfers the weights 3 x and the optimizer" in shown
    assert "average  of the weights, which are read back every 10 updates\n" in shown


def test_a_plan_is_folded_to_its_column_except_in_paths_and_instances(make: Any) -> None:
    plan = make()
    lines = render(plan, 80).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("global batch"))
    assert lines[first + 1] == f"{'':14}update"
    assert [line for line in lines if len(line) > 80 and not line.startswith("  run folder")] == []
    assert render(plan, 20).splitlines()[-3:] == render(plan).splitlines()[-3:]
    lines = render_brief(plan, 40).splitlines()
    assert [line for line in lines if len(line) > 40 and not line.startswith("  run folder")] == []
    for row in ("model", "data", "length", "global batch", "pod", "placement", "run folder"):
        assert sum(line.startswith(f"{row:>12}  ") for line in lines) == 1


def test_every_file_has_its_writer_and_its_line_in_the_documentation() -> None:
    source = (ROOT / "raypod/plan/layout.py").read_text()
    constants = re.findall(r"^    RunFile\((\w+),", source, re.MULTILINE)
    page = (ROOT / "docs/reference/run-folder.md").read_text()
    documented = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    for constant, file in zip(constants, layout.TABLE):
        assert re.search(rf"\b{constant}\b", (ROOT / f"raypod/{file.writer}.py").read_text()), file
        assert any(name.split("/")[0] == file.name for name in documented), file.name
    known = {file.name for file in layout.TABLE}
    files = [name for name in documented if re.fullmatch(r"[a-z-]+\.(json|jsonl|yaml|seal|html)", name)]
    assert {name for name in files if name not in known} == set()
    assert len(known) == len(layout.TABLE) == len(constants)
