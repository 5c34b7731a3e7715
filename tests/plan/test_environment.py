"""The environment variables of an instance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import pytest

from raypod.errors import ConfigError
from raypod.plan import flags, resolve
from raypod.plan.cluster import LOCAL, Cluster, Host, VipuPartition
from raypod.plan.environment import device_environment
from raypod.plan.placement import Sizes, place
from raypod.plan.plan import DatasetSize, TaskFacts, make_plan
from raypod.plan.resolve import from_values
from raypod.runtime.worker.environment import instance_environment
from raypod.system.command_line import FlagParser


def test_the_reports_of_popvision_have_a_folder_for_each_instance(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"opt.a": "b"}')
    plan = make(ipu={"ipu_profile": "/data/reports/"})
    (first, second) = (instance_environment(plan, spec) for spec in plan.placement.instances)
    of_first = {"opt.a": "b", "autoReport.all": "true", "autoReport.directory": "/data/reports/instance-0"}
    assert json.loads(first["POPLAR_ENGINE_OPTIONS"]) == of_first
    assert "instance-1" in second["POPLAR_ENGINE_OPTIONS"]
    assert "POPLAR_ENGINE_OPTIONS" not in instance_environment(make(), plan.placement.instances[0])
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "opt.a=b")
    with pytest.raises(ConfigError, match="POPLAR_ENGINE_OPTIONS=opt.a=b is not a JSON object"):
        instance_environment(plan, plan.placement.instances[0])


def test_the_variables_are_those_of_poprun() -> None:
    """The known case: 8 replicas of 2 IPUs in 4 instances."""
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


def test_the_variables_depend_only_on_the_plan_and_strict_mode_is_one_of_them(make: Any) -> None:
    plan = make(pod={"threads_per_replica": 3, "executable_cache_path": "/cache"})
    before = dict(os.environ)
    first = instance_environment(plan, plan.placement.instances[1])
    assert first == instance_environment(plan, plan.placement.instances[1])
    assert dict(os.environ) == before
    assert (first["OMP_NUM_THREADS"], first["POPTORCH_CACHE_DIR"]) == ("3", "/cache")
    for given, expected in (([], None), (["--strict"], "1"), (["--no-strict"], "0")):
        parser = FlagParser()
        flags.add_flags(parser)
        plan = make(run={"strict": resolve.resolve(parser.parse_args(given)).run.strict})
        assert instance_environment(plan, plan.placement.instances[1]).get("EMULATED_POD_STRICT") == expected


def test_torchvision_is_imported_after_another_sitecustomize(make: Any, tmp_path: Path, processes: None) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.from_the_environment = 42\n")
    plan = make()
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **instance_environment(plan, plan.placement.instances[0], paths)}
    program = "import torchvision; print(from_the_environment, torchvision.models.resnet18().fc)"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("42 Linear("), done.stderr
