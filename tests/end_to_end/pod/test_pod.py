"""End-to-end tests from `raypod up` to a trained model on an emulated pod, which all tests share in this order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from raypod.cli.detached import log_of
from raypod.runs import run_state, verify_data
from raypod.runs.run_state import RunState
from tests.support import SUPPORT
from tests.support.bounded import wait_until
from tests.support.emulated_pod import (
    NETWORK,
    ROOT,
    EmulatedPod,
    address,
    cluster_file,
    copy_source,
    documented_command,
    operate,
    skip_reason,
    train_here,
)
from tests.support.intruder import IS_A_STORE

CLUSTER = "cluster/pod64.yaml"  # as in docs/how-to/pods.md
HOSTS = 3  # plus a fourth, the intruder, which is not in the cluster file
INTRUDER = 4
TRAINING = ["--num-instances", str(HOSTS), "--replicas", str(2 * HOSTS), "--device", "emulated"]
NOTICED_WITHIN_S = 15.0
LOST_INSTANCES = 3  # one on host 3, then at most two on host 2
INSECURE = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")

pytestmark = [pytest.mark.pod, pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pod(shared: Path) -> Iterator[EmulatedPod]:
    """The pod, with a Ray cluster that the documented commands started on its first three hosts."""
    copy_source(shared, HOSTS)
    made = EmulatedPod(f"t{os.getpid()}", HOSTS + 1, shared)
    try:
        assert all(address(host) in operate(made, shared, "raypod plan") for host in (1, 2, 3))
        operate(made, shared, "raypod up", within_s=200)
        yield made
    finally:
        made.down()
    assert f"t{os.getpid()}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def train(shared: Path, name: str, *flags: str) -> str:
    """Return the command line of a run on the head."""
    flags = ("--cluster", str(shared / CLUSTER), "--run-dir", str(shared / name), "--wait-hosts", "150", *flags)
    return f"cd {ROOT} && exec python -m raypod.train {shlex.join((*TRAINING, *flags))}"


def summary(folder: Path) -> Dict[str, Any]:
    content: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def on_this_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("here")
    with train_here(folder, *TRAINING):
        yield folder / "run"


def test_doctor_reports_ready(pod: EmulatedPod, shared: Path) -> None:
    output = operate(pod, shared, "raypod doctor")
    assert all(address(host) in output for host in (1, 2, 3))


def test_a_run_on_the_pod_has_the_weights_of_a_run_on_one_host(pod: Any, shared: Path, on_this_host: Path) -> None:
    settings = (
        f"Host HEAD head\n  HostName {address(1)}\n"  # the documented line is for an operator who has such a name
    )
    pod.run("op", "bash", "-c", f"printf {shlex.quote(settings)} > ~/.ssh/config")
    pod.run("on", "1", "ln", "-s", sys.prefix, "/root/raypod/venv")  # where setup_commands install on real hosts
    try:
        operate(pod, shared, "ssh HEAD", within_s=300)
    finally:
        pod.run("on", "1", "rm", "/root/raypod/venv")
    read = "cat ~/raypod/source/runs/*/{}.json"
    plan, ours = (json.loads(pod.run("on", "1", "bash", "-c", read.format(name))) for name in ("plan", "summary"))
    assert ours["test_accuracy"] >= 95
    assert [plan["instances"][k]["host"] for k in range(HOSTS)] == [address(1), address(2), address(3)]
    assert wait_until((on_this_host / "summary.json").is_file, 200)
    assert ours["weights_sha256"] == summary(on_this_host)["weights_sha256"]


def test_sources_that_are_newer_than_the_running_ray_are_reported(pod: EmulatedPod, shared: Path) -> None:
    up = f"cd {shared} && python -m raypod up --no-restart {CLUSTER}"
    assert "since Ray was started" not in pod.run("op", "bash", "-c", up, within_s=100)
    with (shared / "raypod" / "errors.py").open("a") as file:
        file.write("# newer\n")
    for _ in range(2):  # the second time nothing is copied
        output = pod.run("op", "bash", "-c", up, within_s=100)
        (line,) = [line for line in output.splitlines() if "since Ray was started" in line]
        assert address(1) in line
        assert "/root/raypod/source/raypod/errors.py" in line
        assert f"restart Ray with `raypod up {CLUSTER}`" in line


def test_a_horovod_that_other_hosts_cannot_reach_is_rejected(pod: EmulatedPod, shared: Path) -> None:
    package = shared / "site" / "horovod"
    for module in ("__init__.py", "runner/__init__.py", f"torch/mpi_lib_v2{EXTENSION_SUFFIXES[0]}"):
        (package / module).parent.mkdir(parents=True, exist_ok=True)
        (package / module).touch()
    (shared / "site" / "horovod-0.28.1.dist-info").mkdir()
    (shared / "site" / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    try:
        run = f"{train(shared, 'rejected', '--collectives', 'horovod')}"
        output = pod.run("on", "1", "bash", "-lc", f"({run}); echo exit code $?", check=False)
        doctor = pod.run("op", "bash", "-c", f"cd {shared} && {documented_command('raypod doctor')}", check=False)
        sizes = f"--num-instances {HOSTS} --num-replicas {HOSTS} --run-dir {shared}/launched"
        launch = f"cd {ROOT} && python -m raypod.launch --cluster {shared}/{CLUSTER} {sizes} true"
        launched = pod.run("on", "1", "bash", "-lc", launch)
    finally:
        shutil.rmtree(str(shared / "site"))
    error, code = output.splitlines()[-2:]
    assert code == "exit code 2"
    assert not (shared / "rejected").exists()
    assert re.match(rf"raypod: error: host {NETWORK}.1[123]: its own name host[123] resolves to .* 127.0.1.1", error)
    assert "scripts/install_horovod.sh" in error
    assert "/etc/hosts" in error
    for number in (1, 2, 3):
        problem = f"its own name host{number} resolves to the loopback address 127.0.1.1"
        assert problem in doctor
        # Whether a program uses Horovod is not known.
        assert f"warning: host {address(number)}: a program that uses Horovod aborts: {problem}" in launched


def test_the_cause_of_a_death_on_another_host_contains_its_exception(pod: EmulatedPod, shared: Path) -> None:
    user, folder = shared / "user", "/root/throwing"  # the run folder is not on a shared disk
    user.mkdir()
    (user / "model-throws").touch()
    (shared / "site").mkdir()
    shutil.copy(str(SUPPORT / "fragile.py"), str(shared / "site"))
    flags = f"{shlex.join(TRAINING)} --cluster {shared}/{CLUSTER} --run-dir {folder} --updates 8"
    command = f"cd {user} && python -m raypod.train {flags} --model fragile:model"
    output = pod.run("on", "1", "bash", "-lc", command, within_s=150)
    (line,) = [line for line in output.splitlines() if "is lost" in line]
    assert f"Instance 1 on host {address(2)} is lost: its process died: " in line
    assert "(what(): the device is gone)" in line
    assert "No such file" in pod.run("on", "1", "ls", f"{folder}/logs/instance-1.log", check=False)


# ---- a long run with faults ------------------------------------------------------------------------------------------


class LongRun:
    """A detached training of many epochs on the pod."""

    flags = ("--epochs", "5000", "--lr-schedule", "constant", "--checkpoint-every", "50 updates")

    def __init__(self, pod: EmulatedPod, shared: Path) -> None:
        self.pod, self.folder = pod, shared / "long"
        self._command = train(shared, self.folder.name, *self.flags, "--detach")
        self.start()

    def start(self) -> None:
        """Start or resume the run by the same command; wait until it makes progress."""
        before = self.updates()
        output = self.pod.run("on", "1", "bash", "-lc", self._command, within_s=300)
        assert wait_until(lambda: self.updates() > before + 5, 60), f"{output}\n{self.output()}"

    def state(self) -> RunState:
        found = run_state.read(self.folder)
        assert found is not None
        return found

    def updates(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def output(self) -> str:
        return log_of(self.folder).read_text()

    def reports_lost(self, host: str, since: int) -> bool:
        """Return whether the run reports a lost host in time, after the first `since` characters of its output."""
        return wait_until(lambda: f"on host {host} is lost" in self.output()[since:], NOTICED_WITHIN_S)

    def recovers(self, restarts: int) -> bool:
        repaired = wait_until(lambda: self.state().restarts == restarts, 90)
        before = self.updates()
        return repaired and wait_until(lambda: self.updates() > before + 5, 60)


@pytest.fixture(scope="module")
def long_run(pod: EmulatedPod, shared: Path) -> LongRun:
    return LongRun(pod, shared)


def listening(pod: EmulatedPod) -> List[str]:
    return [f"{address(host)}:{port}" for host in range(1, HOSTS + 1) for port in pod.listening(host) if port != 22]


def test_every_port_refuses_requests_without_the_token(pod: EmulatedPod, shared: Path, long_run: LongRun) -> None:
    token = pod.run("op", "cat", "/root/.ray/auth_token").strip()
    script = str(SUPPORT / "intruder.py")
    output = pod.run("on", str(INTRUDER), "python", script, token, *listening(pod), within_s=120)
    found: Dict[str, Tuple[List[str], List[str]]] = json.loads(output)
    open_to_all = {place: what for place, (what, _) in found.items() if what}
    assert not open_to_all
    # With the token the same calls succeed: they were refused because the token was missing.
    known = {address(1): "NodeInfoGcs", address(2): "NodeManager", address(3): "NodeManager"}
    for host, service in known.items():
        assert any(service in rpc for place, (_, what) in found.items() if place.startswith(host) for rpc in what)
    # The store of the instances was among the ports.
    assert any(IS_A_STORE in what for _, what in found.values())
    assert "denied" in pod.run("on", str(INTRUDER), "ssh", "-o", "BatchMode=yes", *INSECURE, address(1), check=False)
    join = f"export RAY_ADDRESS={address(1)}:6379; {train(shared, 'intruder', '--epochs', '1')}"
    refused = pod.run("on", str(INTRUDER), "bash", "-lc", join, check=False)
    assert "raypod: error: " in refused.splitlines()[-1]
    assert "token" in refused.splitlines()[-1]
    assert not (shared / "intruder" / "metrics.jsonl").exists()
    assert long_run.state().state == run_state.RUNNING


@pytest.mark.parametrize(("fault", "host", "repair"), [("kill", 3, "boot"), ("cut", 2, "mend")])
def test_a_run_continues_after_lost_hosts(pod: Any, long_run: Any, fault: str, host: int, repair: str) -> None:
    seen = len(long_run.output())
    pod.run(fault, str(host))
    try:
        assert long_run.reports_lost(address(host), seen), long_run.output()
        assert long_run.recovers(restarts=1 if fault == "kill" else 2), long_run.output()
    finally:
        pod.run(repair, str(host))


def test_the_same_command_resumes_a_run_whose_coordinator_was_killed(pod: Any, shared: Path, long_run: Any) -> None:
    status = f"cd {ROOT} && python -m raypod status --cluster {shared}/{CLUSTER} {long_run.folder}"
    assert "restarts  2" in pod.run("op", "bash", "-c", status)
    pod.run("on", "1", "kill", "-9", str(long_run.state().pid))
    assert wait_until(lambda: "coordinator died" in pod.run("op", "bash", "-c", status, check=False))
    long_run.start()  # waits until the lost hosts are back
    assert "from update" in long_run.output()


def test_faults_change_neither_data_nor_weights(pod: Any, shared: Path, long_run: Any, tmp_path: Path) -> None:
    stop = f"cd {ROOT} && python -m raypod stop --cluster {shared}/{CLUSTER} {long_run.folder}"
    assert "interrupted after update" in pod.run("op", "bash", "-c", stop)
    unproved = [line for line in verify_data.verify(long_run.folder).lines if "NOT PROVED" in line]
    # For each repair, the last call of a lost instance may be known only from the reports of the others.
    calls = [line for line in unproved if line.endswith("its report was lost with it")]
    assert len(calls) <= LOST_INSTANCES, unproved
    assert len(unproved) <= 2 * len(calls), unproved  # the call, and its epoch
    assert all(line in calls or line.endswith("not proved to be seen") for line in unproved), unproved
    ours = summary(long_run.folder)
    with train_here(tmp_path, *TRAINING, *long_run.flags, "--updates", str(ours["updates"])) as command:
        assert command.wait(300) == 0, (tmp_path / "out").read_text()
    assert ours["weights_sha256"] == summary(tmp_path / "run")["weights_sha256"]


# ---- the head is lost with its disk ----------------------------------------------------------------------------------


def newest_copy(pod: EmulatedPod, host: int) -> int:
    names = pod.run("on", str(host), "bash", "-c", "cd ~/.raypod/copies/copied-*/ && ls -d */run.json", check=False)
    return max((int(update) for update in re.findall(r"(?m)^\d{6}-(\d{8})/run.json$", names)), default=0)


def test_a_run_continues_on_a_new_head_after_the_loss_of_the_old_disk(pod: Any, shared: Path, tmp_path: Path) -> None:
    """The copy is on host 2; the new head is host 3."""
    folder = "/root/copied"  # on no shared disk
    flags = ["--num-instances", "2", "--replicas", "4", "--device", "emulated", *LongRun.flags]
    where = f"--cluster {shared}/{CLUSTER} --run-dir {folder} --wait-hosts 150 --checkpoint-copies 2 --detach"
    command = f"cd {ROOT} && python -m raypod.train {shlex.join(flags)} {where}"
    pod.run("on", "1", "bash", "-lc", command, within_s=200)
    assert wait_until(lambda: newest_copy(pod, 2) >= 100), pod.run("on", "1", "tail", f"{folder}/logs/coordinator.log")
    pod.run("kill", "1")
    pod.run("wipe", "1")
    (shared / CLUSTER).write_text(cluster_file(HOSTS, head=3, lost=[1]))
    output = operate(pod, shared, "raypod up", within_s=200)
    (collected,) = re.findall(rf"collected update-(\d+) \(generation 1\) of {folder} from host {address(2)}\n", output)
    (resume,) = re.findall(rf"continue it: on {address(3)} in ~/raypod/source: (.*)\n", output)
    assert resume == f"python3 -m raypod.train --cluster {CLUSTER} --resume {folder}"
    verify = ("on", "3", "bash", "-lc", f"cd {ROOT} && python -m raypod verify-data {folder}")
    assert "proved: " in pod.run(*verify)
    length = f"--updates {int(collected) + 50}"
    pod.run("on", "3", "bash", "-lc", f"cd ~/raypod/source && {resume} {length} --wait-hosts 150", within_s=200)
    ours = json.loads(pod.run("on", "3", "cat", f"{folder}/summary.json"))
    with train_here(tmp_path, *flags, *length.split()) as undisturbed:
        assert undisturbed.wait(300) == 0, (tmp_path / "out").read_text()
    assert ours["weights_sha256"] == summary(tmp_path / "run")["weights_sha256"]
    assert (ours["checkpoint_copies"]["held"], ours["checkpoint_copies"]["hosts"][1]) == (2, address(2))
    assert f"proved: {int(collected) + 50} updates" in pod.run(*verify)
    again = f"cd {shared} && python -m raypod up --no-restart {CLUSTER}"
    assert "collected" not in pod.run("op", "bash", "-c", again, within_s=100)
    pod.run("boot", "1")


def test_down_stops_all_processes(pod: EmulatedPod, shared: Path) -> None:
    operate(pod, shared, "raypod down", within_s=150)
    assert wait_until(lambda: listening(pod) == [], 10), listening(pod)
