from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable, List, Optional

import pytest

from raypod.cli import FlagParser
from raypod.plan import flags, resolve
from raypod.plan.cluster import LOCAL, Cluster, Host, VipuPartition
from raypod.plan.environment import device_environment, instance_environment
from raypod.plan.placement import Sizes, place
from raypod.plan.plan import DatasetSize, Plan, TaskFacts, make_plan
from raypod.plan.resolve import from_values


def test_the_variables_are_those_of_poprun() -> None:
    """The known case: 8 replicas of 2 IPUs in 4 instances."""
    pod = {"replicas": 8, "num_instances": 4, "ipus_per_replica": 2}
    config = from_values({"pod": pod, "training": {"model": "own:build", "gradient_accumulation": 3}})
    hosts = tuple(Host(f"h{index}", f"10.0.0.{index}") for index in range(2))
    plan = make_plan(config, Cluster("pod", hosts), TaskFacts(DatasetSize(1000, 10)), "run")
    env = [instance_environment(plan, spec) for spec in plan.placement.instances]
    assert [each["POPDIST_REPLICA_INDEX_OFFSET"] for each in env] == ["0", "2", "4", "6"]
    assert [each["POPDIST_LOCAL_INSTANCE_INDEX"] for each in env] == ["0", "1", "0", "1"]
    assert {each["POPDIST_NUM_TOTAL_REPLICAS"] for each in env} == {"8"}
    assert {each["POPDIST_NUM_LOCAL_REPLICAS"] for each in env} == {"2"}
    assert {each["POPDIST_NUM_IPUS_PER_REPLICA"] for each in env} == {"2"}
    assert [each["HOROVOD_RANK"] for each in env] == ["0", "1", "2", "3"]
    assert [each["HOROVOD_CROSS_RANK"] for each in env] == ["0", "0", "1", "1"]
    assert {each["RDMAV_FORK_SAFE"] for each in env} == {"1"}


@pytest.mark.parametrize(
    ("gcds", "expected"), [(4, ["0", "1", "2", "3"]), (1, ["0"] * 4), (None, ["0", "1", "2", "3"])]
)
def test_the_variables_name_the_gcd_of_an_instance(gcds: Optional[int], expected: list[str]) -> None:
    vipu = VipuPartition("p", server="v", port=9000, gcds=gcds)
    placement = place(Cluster("pod", (Host("h0", "h0"), Host("h1", "h1")), vipu=vipu), Sizes(8, 4, 2))
    found = [device_environment(placement, spec) for spec in placement.instances]
    assert [env["IPUOF_VIPU_API_GCD_ID"] for env in found] == expected
    assert {env["IPUOF_VIPU_API_HOST"] for env in found} == {"v"}
    assert {env["IPUOF_VIPU_API_PORT"] for env in found} == {"9000"}
    assert {env["IPUOF_VIPU_API_PARTITION_ID"] for env in found} == {"p"}


def test_without_a_partition_there_are_no_device_variables() -> None:
    placement = place(LOCAL, Sizes(2, 2, 1))
    assert device_environment(placement, placement.instances[0]) == {}


def test_the_variables_depend_only_on_the_plan(make: Callable[..., Plan]) -> None:
    plan = make(pod={"threads_per_replica": 3, "executable_cache_path": "/cache"})
    before = dict(os.environ)
    first = instance_environment(plan, plan.placement.instances[1])
    assert first == instance_environment(plan, plan.placement.instances[1])
    assert dict(os.environ) == before
    assert first["OMP_NUM_THREADS"] == "3"
    assert first["POPTORCH_CACHE_DIR"] == "/cache"


def test_torchvision_can_be_imported_in_the_environment(make: Callable[..., Plan]) -> None:
    plan = make()
    env = {**os.environ, **instance_environment(plan, plan.placement.instances[0], os.environ.get("PYTHONPATH", ""))}
    program = "import torchvision; print(torchvision.models.resnet18().fc)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Linear" in done.stdout


def test_another_sitecustomize_still_runs(make: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.from_the_environment = 42\n")
    plan = make()
    env = {**os.environ, **instance_environment(plan, plan.placement.instances[0], str(tmp_path))}
    done = subprocess.run(
        [sys.executable, "-c", "print(from_the_environment)"], env=env, capture_output=True, timeout=60
    )
    assert done.stdout.strip() == b"42", done.stderr


@pytest.mark.parametrize(("given", "expected"), [([], None), (["--strict"], "1"), (["--no-strict"], "0")])
def test_strict_mode_is_a_variable_of_the_emulated_sdk(
    make: Callable[..., Plan], given: List[str], expected: Optional[str]
) -> None:
    parser = FlagParser()
    flags.add_flags(parser)
    strict = resolve.resolve(flags.parse_arguments(parser, given)).run.strict
    plan = make(run={"strict": strict})
    found = instance_environment(plan, plan.placement.instances[1]).get("EMULATED_POD_STRICT")
    assert found == expected
