"""A pod of several Ray nodes on this machine: launched programs, lost hosts, other sizes, drained hosts.

The tests share one Ray cluster. The last one drains its head, on which Ray schedules nothing then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

import pytest

from raypod import launch
from raypod.events import Repaired, Resized
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.runs import verify_data
from raypod.runtime.workers import ray_replace
from raypod.training.checkpoint import resume
from tests.support import ROOT
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.faulty_runs import Outcome, assert_undisturbed, plan_for, run
from tests.support.ray_cluster import SECOND_HOST, SIZES, THIRD_HOST, RayCluster, end_host, ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
# Ray 2.10 is often too slow to start work on a spare host before that is given up: the head takes the instance then.
HAS_OLD_RAY = tuple(int(part) for part in version("ray").split(".")[:2]) < (2, 50)


class Pod:
    """The hosts of a Ray cluster; the driver is on the head."""

    def __init__(self, started: RayCluster) -> None:
        self.ray, self._started = started.ray, started
        self.head = str(started.nodes[0].node_ip_address)
        self._others: Dict[str, Any] = {}

    def have(self, *addresses: str) -> Cluster:
        """Make these all hosts but the head, and return the cluster."""
        for address in set(self._others) - set(addresses):
            self.lose(address)
        for address in set(addresses) - set(self._others):
            assert wait_until(lambda address=address: address not in self._alive()), "Ray has not noticed its end"
            self._others[address] = self._started.cluster.add_node(node_ip_address=address, **SIZES)
        return Cluster("pod", tuple(Host(each, each) for each in (self.head, *addresses)))

    def _alive(self) -> Set[str]:
        return {each["NodeManagerAddress"] for each in self.ray.nodes() if each["Alive"]}

    def lose(self, address: str) -> None:
        end_host(self._started, self._others.pop(address))

    def drain(self, address: str) -> None:
        node = next(each["NodeID"] for each in self.ray.nodes() if each["NodeManagerAddress"] == address)
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test", "--node-id", node]
        until = ["--deadline-remaining-seconds", "600", "--address", self.ray.get_runtime_context().gcs_address]
        command = [str(Path(sys.executable).parent / "ray"), "drain-node", *reason, *until]
        subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)


@pytest.fixture(scope="module")
def head() -> Iterator[Pod]:
    # Ray then notices the end of a host after 2.5 s, at the fifth connection that is refused, instead of 15 s.
    with ray_cluster(("",), {"RAY_health_check_period_ms": "500"}) as started:
        yield Pod(started)


@pytest.fixture
def pod(head: Pod) -> Iterator[Pod]:
    """The cluster, whose head only is left at the end of a test."""
    yield head
    head.have()


def on_this_host(folder: Path, **sections: Any) -> Outcome:
    return run(plan_for(folder / "inline", LOCAL, run={"fleet": "inline"}, pod={"num_instances": 1}, **sections))


def test_a_program_of_poprun_is_launched(pod: Pod, tmp_path: Path, capfdbinary: Any, monkeypatch: Any) -> None:
    pod.have()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sizes = ["--num-replicas", "4", "--num-instances", "2", "--ipus-per-replica", "2"]
    program = [sys.executable, str(ROOT / "tests" / "programs" / "ddp_main.py"), "--batch-size", "4"]
    flags = ["--gradient-accumulation", "4", "--device-iterations", "2", "--eight-bit-io"]
    assert launch.main([*sizes, *program, *flags]) == 0
    out, err = (text.decode() for text in capfdbinary.readouterr())
    epochs = re.findall(r"^\[1,0\]<stdout>:(\[Epoch \d+\]) loss: \d\.\d{3}, acc: \d+\.\d", out, re.MULTILINE)
    assert epochs == ["[Epoch 01]", "[Epoch 02]"]
    assert all(f"[1,{index}]<stdout>:Namespace(" in out for index in (0, 1))
    assert "[1,0]<stderr>:" in err


def test_the_instance_of_a_lost_host_moves_to_a_spare_host(pod: Pod, tmp_path: Path, monkeypatch: Any) -> None:
    """A language model, whose dropout continues."""
    monkeypatch.setattr(ray_replace, "_ACTOR_START_S", 20.0)  # three hosts share this machine
    sections = {
        "task": {"name": "language-model", "sequence_length": 16, "max_mb": 0.006, "dropout": 0.1},
        "training": {"updates": 20, "epochs": 9, "evaluate_every": 1, "max_grad_norm": 1.0},
    }
    plan = plan_for(tmp_path, pod.have(SECOND_HOST, THIRD_HOST), pod={"num_instances": 2}, **sections)
    assert [host.name for host in plan.placement.hosts] == [pod.head, SECOND_HOST]
    outcome = run(plan, [(6, lambda plan: pod.lose(SECOND_HOST))])
    assert_undisturbed(plan, outcome, on_this_host(tmp_path, **sections))
    losses = [(loss.instance, loss.host, loss.kind) for loss in outcome.losses]
    assert losses == [(1, SECOND_HOST, "died")], "\n".join(map(str, outcome.losses))
    (repair,) = outcome.repairs
    assert repair.hosts == (THIRD_HOST,) or (HAS_OLD_RAY and repair.hosts == (pod.head,))


def sizes(outcome: Outcome) -> List[Any]:
    return [(event.replicas_before, event.replicas, event.gradient_accumulation) for event in outcome.of(Resized)]


def test_a_run_shrinks_when_a_host_is_lost_and_grows_when_it_returns(pod: Pod, tmp_path: Path) -> None:
    plan = plan_for(
        tmp_path,
        pod.have(SECOND_HOST),
        pod={"num_instances": 2, "elastic": True},
        training={"updates": 60, "lr_schedule": "constant", "ema": 0.9},
        run={"checkpoint_every": "10 updates"},
    )
    faults = [(13, lambda plan: pod.lose(SECOND_HOST)), (33, lambda plan: pod.have(SECOND_HOST))]
    outcome = run(plan, faults, are_repaired=False)
    assert sizes(outcome) == [(4, 2, 2), (2, 4, 1)]
    shrunk, grown = outcome.of(Resized)
    assert shrunk.update >= 13, "a survivor had the state"
    assert (shrunk.hosts, grown.hosts) == ((pod.head,), (pod.head, SECOND_HOST))
    assert SECOND_HOST in shrunk.cause
    assert (grown.update % 10, grown.cause) == (0, "hosts have returned")
    assert (outcome.updates, outcome.ended.interrupted) == (list(range(1, 61)), False)
    resizes = [(each["update"], each["replicas"]) for each in outcome.ended.resizes]
    assert resizes == [(shrunk.update, 2), (grown.update, 4)]
    assert [repair.restarts for repair in outcome.repairs] == [1, 1], "growth is no restart"
    verdict = verify_data.verify(Path(plan.run_dir))
    assert verdict.is_proved, verdict.lines
    assert any("2 replicas x accumulation 2" in line for line in verdict.lines)


def test_instances_leave_a_drained_host_and_without_another_one_the_run_ends(pod: Pod, tmp_path: Path) -> None:
    training = {"updates": 2000, "epochs": 400, "lr_schedule": "constant"}
    plan = plan_for(tmp_path, pod.have(SECOND_HOST), pod={"num_instances": 2}, training=training)
    faults = [(3, lambda plan: pod.drain(SECOND_HOST)), (6, lambda plan: pod.drain(pod.head))]
    outcome = run(plan, faults)
    (moved,) = outcome.of(Repaired)
    assert (moved.lost, moved.hosts, moved.seeded_from) == ((1,), (pod.head,), "instance 0")
    assert (moved.restarts, moved.generation, outcome.losses) == (0, 2, [])
    ended = outcome.ended
    assert (ended.interrupted, ended.cause) == (True, f"Ray drains host {pod.head}")
    assert outcome.updates == list(range(1, ended.updates + 1))
    newest, damaged = resume.newest_valid(Path(plan.run_dir) / "checkpoints")
    assert (newest.update, damaged) == (ended.updates, [])
    assert on_this_host(tmp_path, training={**training, "updates": ended.updates}).sha256 == ended.weights_sha256
