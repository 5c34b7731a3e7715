"""From `ray up` to a trained model, on hosts that are network namespaces: one pod for all tests here, in this order."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
from bounded import wait_until
from end_to_end.emulated import NETWORK, REPOSITORY, EmulatedPod, address, why_not
from end_to_end.intruder import IS_A_STORE

from raypod.detached import log_of
from raypod.record import run_state, verify_data
from raypod.record.run_state import RunState

HOSTS = 3  # and a fourth, the intruder, that no file lists
INTRUDER = 4
TRAINING = ["--num-instances", str(HOSTS), "--replicas", str(2 * HOSTS), "--device", "emulated"]
EPOCHS = ["--epochs", "5"]
NOTICED_WITHIN_S = 15.0
LOST_INSTANCES = 3  # host 3 has one, and then host 2 has two at most
INSECURE = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")

pytestmark = [pytest.mark.pod, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


def cluster_file() -> str:
    """The cluster file for hosts without IPUs, with the addresses of this pod, and small: all of it is one machine."""
    text = (REPOSITORY / "cluster" / "emulated-pod.yaml").read_text()
    text = text.replace("10.0.0.", f"{NETWORK}.").replace("ssh_user: ubuntu", "ssh_user: root")
    return text.replace("ray start ", "ray start --num-cpus=1 ").replace("=500000000", "=80000000")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pod(shared: Path) -> Iterator[EmulatedPod]:
    """The pod, with a cluster of Ray that `ray up` has made on its first three hosts."""
    (shared / "cluster.yaml").write_text(cluster_file())
    made = EmulatedPod(f"t{os.getpid()}", HOSTS + 1, shared)
    try:
        made.run("op", "bash", "-c", f"cd {REPOSITORY} && python -m raypod up {shared}/cluster.yaml", within_s=200)
        yield made
    finally:
        made.down()
    assert f"t{os.getpid()}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def train(shared: Path, name: str, *flags: str) -> str:
    """The command line of a run, for the head."""
    flags = ("--cluster", str(shared / "cluster.yaml"), "--run-dir", str(shared / name), "--wait-hosts", "90", *flags)
    return f"cd {REPOSITORY} && exec python -m raypod.train {shlex.join((*TRAINING, *flags))}"


def summary(folder: Path) -> Dict[str, Any]:
    content: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@contextlib.contextmanager
def train_here(folder: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The same training on this one host, into `folder`/run; its output in `folder`/out."""
    line = [sys.executable, "-m", "raypod.train", *TRAINING, *flags, "--run-dir", str(folder / "run")]
    # Not in a Ray that somebody else runs here: a temporary folder of its own, with a short path for Ray's sockets.
    log = folder / "out"
    with log.open("wb") as out, tempfile.TemporaryDirectory(prefix="ray") as temporary:
        environment = {**os.environ, "RAY_TMPDIR": temporary}
        command = subprocess.Popen(line, cwd=REPOSITORY, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield command
        finally:
            command.terminate()
            command.wait(60)


@pytest.fixture(scope="module")
def on_this_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run folder of the same training, under way on this one host."""
    folder = tmp_path_factory.mktemp("here")
    with train_here(folder, *EPOCHS):
        yield folder / "run"


def test_the_doctor_finds_the_pod_ready(pod: EmulatedPod, shared: Path) -> None:
    told = pod.run("op", "bash", "-c", f"cd {REPOSITORY} && python -m raypod doctor --cluster {shared}/cluster.yaml")
    assert all(address(host) in told for host in (1, 2, 3))


def test_a_pod_trains_to_the_weights_of_one_host(pod: EmulatedPod, shared: Path, on_this_host: Path) -> None:
    command = pod.start(1, train(shared, "run", *EPOCHS), shared / "out")
    assert command.wait(200) == 0, (shared / "out").read_text()
    ours = summary(shared / "run")
    assert ours["test_accuracy"] >= 95
    hosts = [json.loads((shared / "run" / "plan.json").read_text())["instances"][k]["host"] for k in range(HOSTS)]
    assert hosts == [address(1), address(2), address(3)]
    assert wait_until((on_this_host / "summary.json").is_file, 120)
    assert ours["weights_sha256"] == summary(on_this_host)["weights_sha256"]


# ---- a run that goes on and on, whatever happens to it --------------------------------------------------------------


class LongRun:
    """A detached training of many epochs, under way on the pod."""

    flags = ("--epochs", "5000", "--lr-schedule", "constant", "--checkpoint-every", "50 updates")

    def __init__(self, pod: EmulatedPod, shared: Path) -> None:
        self.pod, self.folder = pod, shared / "long"
        self._command = train(shared, self.folder.name, *self.flags, "--detach")
        self.start()

    def start(self) -> None:
        """By the command that it was started with before, if it was."""
        before = self.updates()
        told = self.pod.run("on", "1", "bash", "-lc", self._command, within_s=200)
        assert wait_until(lambda: self.updates() > before + 5, 60), f"{told}\n{self.output()}"

    def state(self) -> RunState:
        """What it says of itself."""
        found = run_state.read(self.folder)
        assert found is not None
        return found

    def updates(self) -> int:
        """How many updates it has written down."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def output(self) -> str:
        """What it has printed."""
        return log_of(self.folder).read_text()

    def names(self, host: str, since: int) -> bool:
        """Whether it tells in time of a lost host, beyond the first `since` characters of its output."""
        return wait_until(lambda: f"on host {host} is lost" in self.output()[since:], NOTICED_WITHIN_S)

    def goes_on(self, restarts: int) -> bool:
        """Whether it counts updates again, after so many repairs."""
        repaired = wait_until(lambda: self.state().restarts == restarts, 90)
        before = self.updates()
        return repaired and wait_until(lambda: self.updates() > before + 5, 60)


@pytest.fixture(scope="module")
def long_run(pod: EmulatedPod, shared: Path) -> LongRun:
    """The one of the tests from here on; it ends with the pod."""
    return LongRun(pod, shared)


def listening(pod: EmulatedPod) -> List[str]:
    """Where something listens for other hosts, but for sshd."""
    return [f"{address(host)}:{port}" for host in range(1, HOSTS + 1) for port in pod.listening(host) if port != 22]


def test_who_has_no_token_is_refused_on_every_port(pod: EmulatedPod, shared: Path, long_run: LongRun) -> None:
    token = pod.run("op", "cat", "/root/.ray/auth_token").strip()
    script = str(Path(__file__).with_name("intruder.py"))
    told = pod.run("on", str(INTRUDER), "python", script, token, *listening(pod), within_s=120)
    found: Dict[str, Tuple[List[str], List[str]]] = json.loads(told)
    open_to_all = {place: what for place, (what, _) in found.items() if what}
    assert not open_to_all
    # The same calls are answered to who has the token: they were refused for the lack of it.
    known = {address(1): "NodeInfoGcs", address(2): "NodeManager", address(3): "NodeManager"}
    for host, service in known.items():
        assert any(service in rpc for place, (_, what) in found.items() if place.startswith(host) for rpc in what)
    # The store at which the instances have met was among them.
    assert any(IS_A_STORE in what for _, what in found.values())
    assert "denied" in pod.run("on", str(INTRUDER), "ssh", "-o", "BatchMode=yes", *INSECURE, address(1), check=False)
    join = f"export RAY_ADDRESS={address(1)}:6379; {train(shared, 'intruder', '--epochs', '1')}"
    refused = pod.run("on", str(INTRUDER), "bash", "-lc", join, check=False)
    assert "raypod: error: " in refused.splitlines()[-1]
    assert "token" in refused.splitlines()[-1]
    assert not (shared / "intruder" / "metrics.jsonl").exists()
    assert long_run.state().state == run_state.RUNNING


def test_a_run_goes_on_without_a_host_that_lost_its_power(pod: EmulatedPod, long_run: LongRun) -> None:
    told = len(long_run.output())
    pod.run("kill", "3")
    try:
        assert long_run.names(address(3), told), long_run.output()
        assert long_run.goes_on(restarts=1), long_run.output()
    finally:
        pod.run("boot", "3")


def test_a_run_goes_on_without_a_host_whose_link_is_cut(pod: EmulatedPod, long_run: LongRun) -> None:
    told = len(long_run.output())
    pod.run("cut", "2")
    try:
        assert long_run.names(address(2), told), long_run.output()
        assert long_run.goes_on(restarts=2), long_run.output()
    finally:
        pod.run("mend", "2")


def test_a_run_whose_coordinator_was_killed_goes_on_by_the_same_command(
    pod: EmulatedPod, shared: Path, long_run: LongRun
) -> None:
    ask = f"cd {REPOSITORY} && python -m raypod status --cluster {shared}/cluster.yaml {long_run.folder}"
    assert "restarts  2" in pod.run("op", "bash", "-c", ask)
    pod.run("on", "1", "kill", "-9", str(long_run.state().pid))
    assert wait_until(lambda: "coordinator died" in pod.run("op", "bash", "-c", ask, check=False))
    long_run.start()  # it waits until the hosts that were lost are back
    assert "from update" in long_run.output()


def test_nothing_of_it_shows_in_data_and_weights(
    pod: EmulatedPod, shared: Path, long_run: LongRun, tmp_path: Path
) -> None:
    stop = f"cd {REPOSITORY} && python -m raypod stop --cluster {shared}/cluster.yaml {long_run.folder}"
    assert "interrupted after update" in pod.run("op", "bash", "-c", stop)
    unproved = [line for line in verify_data.verify(long_run.folder).lines if "NOT PROVED" in line]
    # The last call that a lost instance took part in may be known by the others' reports alone, one in each repair.
    calls = [line for line in unproved if line.endswith("its report was lost with it")]
    assert len(calls) <= LOST_INSTANCES, unproved
    assert len(unproved) <= 2 * len(calls), unproved  # and so its epoch
    assert all(line in calls or line.endswith("not proved to be seen") for line in unproved), unproved
    ours = summary(long_run.folder)
    with train_here(tmp_path, *long_run.flags, "--updates", str(ours["updates"])) as command:
        assert command.wait(150) == 0, (tmp_path / "out").read_text()
    assert ours["weights_sha256"] == summary(tmp_path / "run")["weights_sha256"]


def test_down_leaves_nothing(pod: EmulatedPod, shared: Path) -> None:
    pod.run("op", "bash", "-c", f"cd {REPOSITORY} && python -m raypod down {shared}/cluster.yaml", within_s=150)
    assert wait_until(lambda: listening(pod) == [], 10), listening(pod)
