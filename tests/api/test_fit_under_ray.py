"""`raypod.fit` and `raypod.run` inside a Ray session of the caller, in a script, and in another task of Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import pytest
from bounded import COMMAND_S, wait_until
from ray_cluster import ray_cluster

import raypod

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TINY: Dict[str, Any] = {"device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4, "updates": 3, "seed": 7}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray session of two CPUs that this process, not raypod, has started."""
    with ray_cluster(("",), num_cpus=2) as started:
        yield started.ray


def fit(run_dir: Path, **flags: Any) -> raypod.Result:
    return raypod.fit(run_dir=run_dir, progress=False, **TINY, **flags)


def is_unused(ray: Any) -> bool:
    """Whether no actor is alive and all CPUs are available."""
    state = ray._private.state.actors().values()
    return not [each for each in state if each["State"] == "ALIVE"] and ray.available_resources().get("CPU") == 2


def test_a_run_inside_a_session_uses_it_and_leaves_it(ray: Any, tmp_path: Path) -> None:
    result = fit(tmp_path / "ray", num_instances=2)
    inline = fit(tmp_path / "inline", fleet="inline")
    assert result.summary["weights_sha256"] == inline.summary["weights_sha256"]
    assert ray.is_initialized()
    assert wait_until(lambda: is_unused(ray))
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]


def test_a_stream_under_ray_can_be_closed_early(ray: Any, tmp_path: Path) -> None:
    with raypod.stream(run_dir=tmp_path / "run", num_instances=2, **{**TINY, "updates": 100}) as events:
        for event in events:
            if type(event).__name__ == "UpdateDone":
                break
    assert 1 <= events.result().summary["updates"] < 100
    assert events.result().best_checkpoint is not None
    assert wait_until(lambda: is_unused(ray))


def test_a_run_in_a_task_of_a_placement_group_uses_its_bundles(ray: Any, tmp_path: Path) -> None:
    strategies = __import__("ray.util.scheduling_strategies", fromlist=["PlacementGroupSchedulingStrategy"])
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")  # all CPUs
    assert group.wait(COMMAND_S)

    def train(folder: str, flags: Dict[str, Any]) -> Tuple[str, bool]:
        import raypod

        digest = raypod.fit(run_dir=folder, num_instances=1, progress=False, **flags).summary["weights_sha256"]
        return str(digest), "POPDIST_NUM_TOTAL_REPLICAS" in os.environ

    task = ray.remote(train).options(
        num_cpus=1, scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group, 0)
    )
    digest, changed = ray.get(task.remote(str(tmp_path / "task"), TINY), timeout=COMMAND_S)
    assert not changed
    assert digest == fit(tmp_path / "inline", fleet="inline").summary["weights_sha256"]
    ray.util.remove_placement_group(group)
    assert wait_until(lambda: is_unused(ray))


class Unpicklable(Exception):
    """Cannot be made from its pickled arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_a_function_runs_in_every_instance(ray: Any, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert ray.is_initialized()
    assert wait_until(lambda: is_unused(ray))


def test_an_exception_names_instance_and_host_and_has_the_original_as_its_cause(ray: Any) -> None:
    def fails_in_one() -> None:
        import horovod.torch as hvd
        import torch

        if hvd.rank() == 1:
            raise ZeroDivisionError("in one instance")
        hvd.allreduce(torch.zeros(1))

    with pytest.raises(raypod.FunctionFailed, match="instance 1 on host localhost failed: .*in one instance") as caught:
        raypod.run(fails_in_one, num_instances=2, device="emulated")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.instance, caught.value.host) == (1, "localhost")
    assert "in fails_in_one" in caught.value.traceback
    assert isinstance(caught.value, raypod.RunError)

    def fails(how: str) -> Any:
        if how == "unpicklable":
            raise Unpicklable(1, 2)
        if how == "exit":
            sys.exit(3)
        if how == "die":
            os._exit(3)
        return (each for each in "a generator")

    expected = {
        "unpicklable": "Unpicklable: 1 and 2",
        "exit": "SystemExit: 3",
        "die": "its process died",
        "return": "the result, of type generator, cannot be pickled",
    }
    for how, message in expected.items():
        with pytest.raises(raypod.FunctionFailed, match=f"instance 0 on host localhost failed: .*{message}") as caught:
            raypod.run(fails, how, device="emulated")
        assert (caught.value.__cause__ is None) == (how in ("unpicklable", "die"))
    assert wait_until(lambda: is_unused(ray))


def test_a_function_that_does_not_end_is_a_timeout(ray: Any) -> None:
    began = time.monotonic()
    with pytest.raises(raypod.WaitTimedOut, match="the function to end in instance 0 on host localhost"):
        raypod.run(lambda: time.sleep(1000), timeout_s=0.5, device="emulated")
    assert time.monotonic() - began < COMMAND_S
    assert wait_until(lambda: is_unused(ray))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_instance": 2}, "did you mean num_instances?"),
        ({"num_instances": 0}, "num_instances = 0: must be a positive whole number"),
        ({"num_instances": True}, "num_instances = True"),
        ({"num_instances": 2, "replicas": 3}, "3 replicas cannot be divided"),
        ({"device": "gpu"}, "use auto, ipu or emulated"),
        ({"collectives": "nccl"}, "must be one of auto, horovod, gloo"),
        ({"threads_per_replica": -1}, "threads_per_replica = -1"),
        ({"timeout_s": 0}, "timeout_s = 0: must be greater than 0"),
        ({"cluster": "missing.yaml"}, "cannot read the cluster file"),
    ],
)
def test_a_wrong_request_of_run_starts_nothing(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(raypod.UserError) as caught:
        raypod.run(lambda: None, **arguments)
    assert message in str(caught.value)


SCRIPT = """
import os, sys, threading, warnings
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

    def network(self, first_batch):
        return nn.Linear(1, 1)

    def training_outputs(self, network, x, y):
        warnings.warn("a line is enough")
        return nn.functional.mse_loss(network(x), y), {}

    def evaluation_outputs(self, network, x, y):
        return {"loss": (((network(x) - y) ** 2).mean(dim=1), 1)}


def state():
    process = psutil.Process()
    connections = "net_connections" if hasattr(process, "net_connections") else "connections"
    sockets = [each[:-1] for each in getattr(process, connections)()]
    threads = sorted(thread.name for thread in threading.enumerate())
    return dict(os.environ), list(sys.path), Path.cwd(), threads, sockets, process.children()


flags = dict(task=Line, slope=3.0, replicas=2, batch_size=4, updates=4, device="emulated", progress=False)
first = raypod.fit(run_dir="a", num_instances=2, **flags)
after_first = state()
second = raypod.fit(run_dir="b", num_instances=1, **flags)
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
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[4]", "same state True []", "same weights True", "connected False False False"]
    place = r"UserWarning: a line is enough \((script\.py:|line )\d+, in training_outputs\) \(instance 0; its log: "
    warned = [line for line in done.stderr.splitlines() if re.match(place, line)]
    assert [line.endswith(f"{tmp_path}/{run}/logs/instance-0.log)") for line, run in zip(warned, "ab")] == [True, True]
