"""`raypod.fit` and `raypod.run` inside a Ray session of the caller, in a script, and in another task of Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import pytest

import raypod
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.ray_cluster import ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
TINY: Dict[str, Any] = {"device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4, "updates": 3, "seed": 7}


@pytest.fixture
def ray() -> Iterator[Any]:
    """A Ray session of two CPUs that this process, not raypod, has started; it must be unused at the end."""
    with ray_cluster(("",), num_cpus=2) as started:
        yield started.ray
        assert started.ray.is_initialized()
        assert wait_until(lambda: is_unused(started.ray))


def is_unused(ray: Any) -> bool:
    """Return whether no actor is alive and all CPUs are available."""
    state = ray._private.state.actors().values()
    groups = ray.util.placement_group_table().values()
    is_alive = any(each["State"] == "ALIVE" for each in state) or any(each["state"] == "CREATED" for each in groups)
    return not is_alive and ray.available_resources().get("CPU") == 2


def test_functions_and_a_run_in_a_session_of_the_caller_use_it_and_leave_it(
    ray: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factor = 3

    def of_instance(value: int, *, offset: int) -> Tuple[Any, ...]:
        import horovod.torch as hvd
        import popdist
        import poptorch
        import torch

        total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
        print("from instance", popdist.getInstanceIndex())  # noqa: T201
        return hvd.rank(), hvd.size(), popdist.getNumTotalReplicas(), total, factor * value + offset, poptorch.Options

    import poptorch

    results = raypod.run(of_instance, 5, offset=2, num_instances=2, replicas=4, device="emulated")
    assert results == [(rank, 2, 4, 3.0, 17, poptorch.Options) for rank in (0, 1)]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[1,{n}]<stdout>:from instance {n}" for n in (0, 1)]

    def fails_in_one(how: str) -> None:
        import horovod.torch as hvd
        import torch

        if hvd.rank() == 1:
            if how == "die":
                os._exit(3)
            raise ZeroDivisionError("in one instance")
        hvd.allreduce(torch.zeros(1))

    for how, cause, kind in (("raise", "in one instance", ZeroDivisionError), ("die", "its process died", type(None))):
        with pytest.raises(raypod.FunctionFailed, match=f"instance 1 on host localhost failed: .*{cause}") as caught:
            raypod.run(fails_in_one, how, num_instances=2, device="emulated")
        assert isinstance(caught.value.__cause__, kind)
        assert ("in fails_in_one" in caught.value.traceback) is (how == "raise")
    assert wait_until(lambda: is_unused(ray))
    strategies = __import__("ray.util.scheduling_strategies", fromlist=["PlacementGroupSchedulingStrategy"])
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")  # all CPUs
    assert group.wait(COMMAND_S)

    def train(folder: str, flags: Dict[str, Any]) -> Tuple[str, bool]:
        import raypod

        digest = raypod.fit(run_dir=folder, num_instances=1, progress=False, **flags).summary["weights_sha256"]
        return str(digest), "POPDIST_NUM_TOTAL_REPLICAS" in os.environ

    strategy = strategies.PlacementGroupSchedulingStrategy(group, 0)
    task = ray.remote(train).options(num_cpus=1, scheduling_strategy=strategy)
    digest, changed = ray.get(task.remote(str(tmp_path / "task"), TINY), timeout=COMMAND_S)
    assert not changed
    inline = raypod.fit(run_dir=tmp_path / "inline", fleet="inline", progress=False, **TINY)
    assert digest == inline.summary["weights_sha256"]
    ray.util.remove_placement_group(group)


SCRIPT = """
import os, sys, threading, time, warnings
from pathlib import Path
import psutil
import torch
from torch import nn
import raypod
class Line(raypod.Task):
    class Options(raypod.TaskOptions):
        slope: float = 2.0
    def datasets(self):
        x = torch.arange(64.0).reshape(64, 1) / 64
        return raypod.Arrays(x=x, y=self.options.slope * x), raypod.Arrays(x=x, y=self.options.slope * x)
    def network(self, first_batch): return nn.Linear(1, 1)
    def training_outputs(self, network, x, y):
        warnings.warn("a line is enough")
        return nn.functional.mse_loss(network(x), y), {}
    def evaluation_outputs(self, network, x, y): return {"loss": (((network(x) - y) ** 2).mean(dim=1), 1)}
def state():
    process = psutil.Process()
    connections = "net_connections" if hasattr(process, "net_connections") else "connections"
    deadline = time.monotonic() + 10
    sockets = getattr(process, connections)()
    # Ray 2.10 closes its connections some time after its shutdown.
    while any(each.status != psutil.CONN_LISTEN for each in sockets) and time.monotonic() < deadline:
        time.sleep(0.05)
        sockets = getattr(process, connections)()
    sockets = [each[:-1] for each in sockets]
    threads = sorted(thread.name for thread in threading.enumerate())
    return dict(os.environ), list(sys.path), Path.cwd(), threads, sockets, process.children()
flags = dict(task=Line, slope=3.0, replicas=2, batch_size=4, updates=4, device="emulated", progress=False)
first = raypod.fit(run_dir="a", num_instances=2, **flags)
after_first = state()
second = raypod.fit(run_dir="b", num_instances=1, fleet="ray", **flags)
print(raypod.run(lambda: second.summary["updates"], device="emulated"))
after_second = state()
print("same state", after_first == after_second, [a for a, b in zip(after_first, after_second) if a != b])
network = nn.Linear(1, 1)
first.load_weights_into(network)
print("same weights", first.summary["weights_sha256"] == second.summary["weights_sha256"])
import ray
print("connected", ray.is_initialized(), "POPDIST_NUM_TOTAL_REPLICAS" in os.environ, "RAY_AUTH_TOKEN" in os.environ)
"""


def test_a_script_without_a_guard_runs_twice_in_sessions_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    options: Any = {"capture_output": True, "text": True, "timeout": 2 * COMMAND_S, "check": False}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[4]", "same state True []", "same weights True", "connected False False False"]
    place = r"UserWarning: a line is enough \((script\.py:|line )\d+, in training_outputs\) \(instance 0; its log: "
    warned = [line for line in done.stderr.splitlines() if re.match(place, line)]
    assert [line.endswith(f"{tmp_path}/{run}/logs/instance-0.log)") for line, run in zip(warned, "ab")] == [True, True]
