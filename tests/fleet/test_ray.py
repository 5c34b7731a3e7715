"""Runs under Ray: the same weights for every placement, and all ways in which a run can end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import psutil
import pytest
from bounded import COMMAND_S, GONE_WITHIN_S, wait_until
from ray_cluster import SECOND_HOST, ray_cluster

from raypod.checkpoint import resume
from raypod.coordinator import coordinator
from raypod.errors import ClusterError, InstanceFailed, WaitTimedOut
from raypod.events import Event, InstanceLost, Repaired, RunEnded, UpdateDone
from raypod.fleet.inline import InlineFleet
from raypod.fleet.ray import RayFleet
from raypod.fleet.ray_nodes import match_hosts, wait_for_nodes
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.config import Config
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.record import run_state
from raypod.record.metrics import MetricsAggregator
from raypod.tasks.registry import facts_of
from raypod.train import main

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

UPDATES = 5


@pytest.fixture(scope="module")
def pod() -> Iterator[Any]:
    """Ray, connected to a cluster of two hosts with 4 IPUs each."""
    with ray_cluster(resources={"IPU": 4}) as started:
        yield started.ray


@pytest.fixture(scope="module")
def two_hosts(pod: Any) -> Cluster:
    """Both hosts, the head first, as a cluster file would list them."""
    addresses = [node["NodeManagerAddress"] for node in pod.nodes()]
    head = next(address for address in addresses if address != SECOND_HOST)
    return Cluster("two", (Host(head, head), Host(SECOND_HOST, SECOND_HOST)))


def plan_for(folder: Path, cluster: Cluster = LOCAL, **sections: Dict[str, Any]) -> Plan:
    sections = {**sections, "training": {"updates": UPDATES, **sections.get("training", {})}}
    sections = {**sections, "run": {"device": "emulated", **sections.get("run", {})}}
    config: Config = from_values(sections)
    return make_plan(config, cluster, facts_of(config), str(folder / "run"))


def run(plan: Plan) -> List[Event]:
    fleet = InlineFleet(plan) if plan.config.run.fleet == "inline" else RayFleet(plan)
    return list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))


def sha256(events: List[Event]) -> str:
    return next(event for event in events if isinstance(event, RunEnded)).weights_sha256


@pytest.fixture(scope="module")
def inline_events(tmp_path_factory: pytest.TempPathFactory) -> List[Event]:
    """The reference: 4 replicas in one instance, in this process."""
    plan = plan_for(tmp_path_factory.mktemp("inline"), run={"fleet": "inline", "device": "emulated"})
    return run(plan)


@pytest.mark.parametrize(("instances", "hosts"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_the_weights_are_bitwise_equal_for_every_placement(
    two_hosts: Cluster, inline_events: List[Event], tmp_path: Path, instances: int, hosts: int
) -> None:
    cluster = two_hosts if hosts == 2 else LOCAL
    events = run(plan_for(tmp_path, cluster, pod={"num_instances": instances}))
    assert sha256(events) == sha256(inline_events)
    updates = [[(e.update, e.metrics) for e in each if isinstance(e, UpdateDone)] for each in (events, inline_events)]
    assert updates[0] == updates[1]
    assert len(updates[0]) == UPDATES


def test_a_run_resumes_exactly_on_more_hosts(two_hosts: Cluster, tmp_path: Path) -> None:
    one = {"run": {"fleet": "inline"}, "pod": {"num_instances": 1}}

    def constant(updates: int) -> Dict[str, Any]:
        return {"lr_schedule": "constant", "updates": updates}

    whole = run(plan_for(tmp_path / "whole", training=constant(9), **one))
    run(plan_for(tmp_path, training=constant(4), **one))
    resumed_from = {"resume": str(tmp_path / "run")}
    plan = plan_for(tmp_path, two_hosts, training=constant(9), run=resumed_from, pod={"num_instances": 2})
    resumed = resume.find_checkpoint(plan).checkpoint
    events = list(coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0), resumed))
    assert [event.update for event in events if isinstance(event, UpdateDone)] == [5, 6, 7, 8, 9]
    assert sha256(events) == sha256(whole)


def instance_processes() -> List[int]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "InstanceP" in process.name():  # the kernel keeps 15 characters of "ray::InstanceProcess"
                found.append(process.pid)
    return found


def nothing_is_left(ray: Any) -> bool:
    groups = ray.util.placement_group_table().values()
    return not instance_processes() and all(group["state"] == "REMOVED" for group in groups)


def test_the_environment_is_set_before_the_instances_import_the_sdk(pod: Any, tmp_path: Path) -> None:
    fleet = RayFleet(plan_for(tmp_path, pod={"num_instances": 2, "threads_per_replica": 1}))
    try:
        fleet.start()
        assert len(instance_processes()) == 2
        environments = pod.get([actor.environment.remote() for actor in fleet._actors])
    finally:
        fleet.close()
    assert [env["POPDIST_REPLICA_INDEX_OFFSET"] for env in environments] == ["0", "2"]
    assert {env["OMP_NUM_THREADS"] for env in environments} == {"1"}
    assert "instance 1 of 2" in Path(fleet._plan.log_file(1)).read_text()


def test_a_heartbeat_has_the_last_line_of_the_log_since_the_start_or_the_last_repair(pod: Any, tmp_path: Path) -> None:
    fleet = RayFleet(plan_for(tmp_path, pod={"num_instances": 2}))
    try:
        fleet.start()
        beats = pod.get([actor.beat.remote() for actor in fleet._actors])
        logs = [Path(fleet._plan.log_file(index)).read_text().splitlines() for index in range(2)]
        pod.get([actor.call.remote("leave") for actor in fleet._actors])
        later = pod.get([actor.beat.remote() for actor in fleet._actors])
    finally:
        fleet.close()
    assert [each.log_line for each in beats] == [lines[-1] for lines in logs]
    assert [each.log_line for each in later] == [None, None]


def test_a_killed_instance_is_named_and_nothing_is_left(pod: Any, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pod={"num_instances": 2}, training={"updates": 600}, run={"max_restarts": 0})
    killed_at_s: List[float] = []

    def kill_one_after_three_updates() -> None:
        for event in coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0)):
            if isinstance(event, UpdateDone) and event.update == 3:
                os.kill(_pid_in(plan.log_file(1)), signal.SIGKILL)
                killed_at_s.append(time.monotonic())

    with pytest.raises(InstanceFailed) as caught:
        kill_one_after_three_updates()
    assert time.monotonic() - killed_at_s[0] < GONE_WITHIN_S
    assert (caught.value.instance, caught.value.host) == (1, "localhost")
    assert caught.value.log_file == plan.log_file(1)
    assert wait_until(lambda: nothing_is_left(pod))


def _pid_in(log_file: str) -> int:
    return int(Path(log_file).read_text().split("pid ")[1].split(":")[0])


def test_an_instance_that_raises_is_named_with_its_error(
    pod: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_model.py").write_text(
        "import os, torch\n"
        "def make(channels, classes):\n"
        "    if os.environ['POPDIST_REPLICA_INDEX_OFFSET'] == '2':\n"
        "        raise ValueError('no such layer')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = plan_for(tmp_path, pod={"num_instances": 2}, training={"model": "bad_model:make"})
    with pytest.raises(InstanceFailed, match="instance 1 on host localhost failed: ValueError: no such layer"):
        run(plan)
    assert "bad_model.py" in Path(plan.log_file(1)).read_text()
    assert wait_until(lambda: nothing_is_left(pod))


def test_a_model_that_the_sdk_rejects_ends_the_run_without_a_restart(
    pod: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rejected_model.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, images):\n"
        "        logits = super().forward(images.flatten(1))\n"
        "        return logits if logits.sum() < 1e9 else logits + 1\n"
        "def make(channels, classes): return Model(64, classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    training = {"model": "rejected_model:make", "updates": 4}
    plan = plan_for(tmp_path, pod={"num_instances": 2}, training=training, run={"strict": True})
    events: List[Event] = []
    with pytest.raises(
        InstanceFailed, match=r"on host localhost failed: poptorch\.errors\.Error: aten::item"
    ) as caught:
        events.extend(coordinator.run(plan, RayFleet(plan), MetricsAggregator(plan, 0.0)))
    assert not any(isinstance(event, (InstanceLost, Repaired)) for event in events)
    assert "aten::item" in Path(caught.value.log_file).read_text()
    assert wait_until(lambda: nothing_is_left(pod))


def test_an_exception_during_a_leg_is_reported_while_the_others_wait(
    pod: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_data.py").write_text(
        "import os, torch\n"
        "class Data:\n"
        "    def __init__(self, samples): self.samples, self.made = samples, 0\n"
        "    def __len__(self): return self.samples\n"
        "    def __getitem__(self, index):\n"
        "        self.made += 1\n"
        "        if self.made > 100 and os.environ['POPDIST_REPLICA_INDEX_OFFSET'] == '0':\n"
        "            raise OSError('the disk is gone')\n"
        "        return torch.zeros(1, 8, 8), index % 2\n"
        "def make(folder): return Data(2000), Data(8), 2\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = plan_for(
        tmp_path,
        data={"dataset": "bad_data:make"},
        pod={"num_instances": 2},
        training={"updates": 60},
        run={"max_restarts": 0},
    )
    began = time.monotonic()
    with pytest.raises(InstanceFailed, match="instance 0 on host localhost failed: OSError: the disk is gone"):
        run(plan)
    assert time.monotonic() - began < 60
    assert wait_until(lambda: nothing_is_left(pod))


def never_built(channels: int, classes: int) -> None:
    raise AssertionError("the run is rejected before")


def test_more_ipus_than_the_pod_has_are_rejected_at_once(pod: Any, tmp_path: Path) -> None:
    sizes = {"model": f"{__name__}:never_built", "gradient_accumulation": 7}
    plan = plan_for(tmp_path, pod={"num_instances": 2, "ipus_per_replica": 4}, training=sizes)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"localhost has 4 IPUs and the plan puts 16 on it \(the pod has 8 in all"):
        run(plan)
    assert time.monotonic() - began < GONE_WITHIN_S


def test_a_host_without_ipus_in_a_pod_with_ipus_is_named(tmp_path: Path) -> None:
    cluster = Cluster("two", (Host("a", "10.0.0.1"), Host("b", "10.0.0.2")))
    node = {"Alive": True, "NodeManagerHostname": "", "Resources": {"IPU": 16.0}}
    nodes = [{**node, "NodeManagerAddress": "10.0.0.1"}, {**node, "NodeManagerAddress": "10.0.0.2", "Resources": {}}]
    with pytest.raises(ClusterError, match="host b has 0 IPUs and the plan puts 2 on it"):
        match_hosts(SimpleNamespace(nodes=lambda: nodes), plan_for(tmp_path, cluster).placement)


def test_a_missing_host_is_named_at_once(two_hosts: Cluster, tmp_path: Path) -> None:
    cluster = Cluster("pod16", (two_hosts.hosts[1], Host("10.9.9.9", "10.9.9.9")))
    with pytest.raises(ClusterError, match=r"pod16: no Ray node is alive on 10\.9\.9\.9; alive: .*127\.0\.0\.2"):
        run(plan_for(tmp_path, cluster, pod={"num_instances": 2}))


def test_a_missing_host_is_waited_for_and_named(tmp_path: Path) -> None:
    cluster = Cluster("two", (Host("a", "10.0.0.1"), Host("b", "10.0.0.2")))
    node = {"Alive": True, "NodeManagerHostname": "", "Resources": {}}
    nodes = [{**node, "NodeManagerAddress": "10.0.0.1"}]
    lines: List[str] = []

    def log(line: str) -> None:
        lines.append(line)
        nodes.append({**node, "NodeManagerAddress": "10.0.0.2"})

    found = wait_for_nodes(SimpleNamespace(nodes=lambda: nodes), plan_for(tmp_path, cluster).placement, 30, log)
    assert [each["NodeManagerAddress"] for each in found] == ["10.0.0.1", "10.0.0.2"]
    assert lines == ["waiting for b (30 s more, --wait-hosts)"]
    with pytest.raises(ClusterError, match="no Ray node is alive on b"):
        wait_for_nodes(
            SimpleNamespace(nodes=lambda: nodes[:1]), plan_for(tmp_path, cluster).placement, 0.1, lines.append
        )


def test_instances_connect_only_in_the_data_network(pod: Any, two_hosts: Cluster, tmp_path: Path) -> None:
    cluster = dataclasses.replace(two_hosts, data_network="127.0.0.0/8")
    fleet = RayFleet(plan_for(tmp_path, cluster, pod={"num_instances": 2}))
    try:
        fleet.start()
        for environment in pod.get([actor.environment.remote() for actor in fleet._actors]):
            assert environment["GLOO_SOCKET_IFNAME"] == environment["HOROVOD_GLOO_IFACE"] == "lo"
            assert environment["EMULATED_POD_RENDEZVOUS"].startswith("127.")
    finally:
        fleet.close()


def test_a_host_outside_the_data_network_is_named(two_hosts: Cluster, tmp_path: Path) -> None:
    cluster = dataclasses.replace(two_hosts, data_network="10.213.0.0/30")
    with pytest.raises(
        ClusterError, match=r"has no address in metadata\.raypod\.data_network 10\.213\.0\.0/30; it has lo "
    ):
        run(plan_for(tmp_path, cluster, pod={"num_instances": 2}))


def test_a_busy_pod_is_waited_for_within_the_bound(pod: Any, tmp_path: Path) -> None:
    taken = pod.util.placement_group([{"IPU": 3}], strategy="PACK")
    also = pod.util.placement_group([{"IPU": 3}], strategy="PACK")
    assert taken.wait(10)
    assert also.wait(10)
    try:
        plan = plan_for(tmp_path, run={"start_timeout_s": 1, "device": "emulated"})
        with pytest.raises(
            WaitTimedOut, match=r"waited 1 s for Ray to reserve resources.*localhost.*run\.start_timeout_s"
        ):
            run(plan)
    finally:
        pod.util.remove_placement_group(taken)
        pod.util.remove_placement_group(also)


# ---- the command, in its own Ray session ---------------------------------------------------------------------------


def start_command(folder: Path, *flags: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--run-dir", str(folder / "run"), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_for_lines(folder: Path, condition: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + COMMAND_S
    path = folder / "run" / "metrics.jsonl"
    while not (path.is_file() and condition(path.read_text())):
        assert time.monotonic() < deadline, "no update within 90 s"
        time.sleep(0.05)


def session_processes(command: subprocess.Popen[str]) -> List[psutil.Process]:
    return psutil.Process(command.pid).children(recursive=True)


def are_gone(processes: List[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    return not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_ends_a_run_with_a_checkpoint_and_exit_code_130(
    tmp_path: Path, number: int
) -> None:
    command = start_command(tmp_path, "--epochs", "400")
    wait_for_lines(tmp_path, lambda text: text.count("\n") > 3)
    processes = session_processes(command)
    command.send_signal(number)
    os.killpg(command.pid, number)  # `timeout` sends its signal to the process and to its group
    out, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 130, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"]
    assert (Path(summary["checkpoint"]) / "manifest.json").is_file()
    assert summary["updates"] == len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert f"Interrupted after update {summary['updates']}; continue with --resume" in out
    state = run_state.read(tmp_path / "run")
    assert state is not None
    assert (state.state, state.exit_code) == (run_state.INTERRUPTED, 130)
    assert are_gone(processes)


def test_a_sigterm_during_the_start_ends_the_run_with_130(tmp_path: Path) -> None:
    command = start_command(tmp_path, "--epochs", "400")
    logs = tmp_path / "run" / "logs"
    assert wait_until(lambda: logs.is_dir() and any(logs.iterdir()), 90)  # the first instance has its process
    processes = session_processes(command)
    command.send_signal(signal.SIGTERM)
    _, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 130, err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert are_gone(processes)


def test_a_killed_instance_ends_the_command_with_1_and_one_line(tmp_path: Path) -> None:
    command = start_command(tmp_path, "--epochs", "400", "--max-restarts", "0")
    wait_for_lines(tmp_path, lambda text: text.count("\n") > 3)
    processes = session_processes(command)
    os.kill(_pid_in(str(tmp_path / "run" / "logs" / "instance-1.log")), signal.SIGKILL)
    _, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 1
    (line,) = err.strip().splitlines()
    assert line.startswith("raypod: error: instance 1 on host localhost failed: ")
    assert line.endswith("/run/logs/instance-1.log")
    assert are_gone(processes)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    command = start_command(tmp_path, "--epochs", "400")
    wait_for_lines(tmp_path, lambda text: text.count("\n") > 3)
    processes = session_processes(command)
    for _ in range(2):
        os.killpg(command.pid, signal.SIGINT)
        time.sleep(0.5)  # an earlier signal is a copy of the first
    _, err = command.communicate(timeout=COMMAND_S)
    # On a slow machine the second signal may come while the interpreter exits; a shell reports 130 for both.
    assert command.returncode in (130, -signal.SIGINT), err
    assert "error:" not in err  # Python may report an exception in a finalizer, which it ignores
    assert are_gone(processes)


def test_ctrl_c_while_ray_shuts_down_takes_effect_after_it() -> None:
    program = """
import os, signal, sys
from raypod.cli import report_errors
from raypod.fleet.ray_session import RaySession
from raypod.plan.cluster import LOCAL
from raypod.plan.plan import make_plan
from raypod.plan.resolve import from_values
from raypod.tasks.registry import facts_of

def disconnect(*arguments, **options):
    ray._private.worker.disconnect = ray_disconnect
    ray_disconnect(*arguments, **options)
    os.kill(os.getpid(), signal.SIGINT)

config = from_values({"run": {"device": "emulated"}})
session = RaySession(make_plan(config, LOCAL, facts_of(config), "unused").placement)
ray = session.open()
ray_disconnect, ray._private.worker.disconnect = ray._private.worker.disconnect, disconnect
code = report_errors(session.close)
print("the node is", ray._private.worker._global_node)
sys.exit(code)
"""
    command = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=COMMAND_S)
    assert (command.returncode, command.stderr) == (130, "raypod: interrupted\n")
    assert command.stdout == "the node is None\n"


def test_a_run_resumes_under_ray_with_another_placement(tmp_path: Path) -> None:
    constant = ("--lr-schedule", "constant")
    for flags in (("--updates", "6"), ("--updates", "12", "--resume", str(tmp_path / "run"), "--num-instances", "1")):
        command = start_command(tmp_path, *constant, *flags)
        _, err = command.communicate(timeout=COMMAND_S)
        assert command.returncode == 0, err
    whole = ["--device", "emulated", "--fleet", "inline", "--num-instances", "1", "--run-dir", str(tmp_path / "whole")]
    assert main([*whole, *constant, "--updates", "12"]) == 0
    hashes = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert hashes[0]["weights_sha256"] == hashes[1]["weights_sha256"]
