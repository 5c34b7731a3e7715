"""`raypod launch` on a Ray cluster of two hosts: a failure, signals, output, and a lost host."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Iterator

import psutil
import pytest

from tests.support import ROOT
from tests.support.bounded import COMMAND_S, ended_processes, wait_until
from tests.support.launches import TWO, Launch, launcher, python
from tests.support.ray_cluster import SECOND_HOST, SIZES, THIRD_HOST, RayCluster, ray_cluster

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
MARK = "RAYPOD_TEST_LAUNCH"  # all processes of the cluster inherit it
Command = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(variables={MARK: str(os.getpid())}, num_cpus=2) as made:
        yield made


@pytest.fixture
def hosts(cluster: RayCluster) -> str:
    return f"{cluster.nodes[0].node_ip_address},{SECOND_HOST}"


@pytest.fixture(autouse=True)
def cleaned_up(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder; no actor, placement group and reaper may be left."""
    monkeypatch.chdir(tmp_path)
    yield
    assert wait_until(lambda: not any(map(is_ours, psutil.process_iter())))
    groups = cluster.ray.util.placement_group_table
    assert wait_until(lambda: all(group["state"] == "REMOVED" for group in groups().values()))


def is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline() or [""]
        if "HostProcess" in words[0] or any("launcher/" in word for word in words[:5]):
            return process.environ().get(MARK) == str(os.getpid())  # not of a parallel run of these tests
    return False


@pytest.fixture
def launch(capfdbinary: pytest.CaptureFixture[bytes]) -> Launch:
    return launcher(capfdbinary)


@pytest.fixture
def command(cluster: RayCluster) -> Iterator[Command]:
    """Start the command as a process that joins the cluster."""
    with ended_processes() as started:

        def start(*words: str) -> subprocess.Popen[bytes]:
            env = {**os.environ, "RAY_ADDRESS": cluster.cluster.address, "PYTHONPATH": str(ROOT)}
            line = [sys.executable, "-m", "raypod.launch", *words]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(line, env=env, stdin=pipe, stdout=pipe, start_new_session=True))
            return started[-1]

        yield start


def test_a_signal_to_the_process_group_is_forwarded_and_a_killed_launch_ends_all_programs(command: Command) -> None:
    script = "trap 'echo stopped; exit' INT; echo ready; while :; do sleep 0.1; done"
    launched = command(*TWO, "sh", "-c", script)
    assert sorted(launched.stdout.readline() for _ in range(2)) == [b"[1,%d]<stdout>:ready\n" % k for k in range(2)]
    os.killpg(launched.pid, signal.SIGINT)
    assert sorted(launched.stdout) == [b"[1,%d]<stdout>:stopped\n" % index for index in range(2)]
    assert launched.wait(COMMAND_S) == 130
    killed = command("sh", "-c", "setsid sleep 61 & echo $!; sleep 61 & echo $!; echo $$; wait")
    pids = [int(killed.stdout.readline().rpartition(b":")[2]) for _ in range(3)]
    killed.kill()
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_every_line_is_printed_once_and_complete(launch: Launch, command: Command, hosts: str) -> None:
    words = python("for i in range(20_000): print('line', i); print('same')")
    found = launch(*TWO, "-H", hosts, "--run-dir", "run", *words)
    expected = [line for i in range(20_000) for line in (f"line {i}", "same")]
    for index in range(2):
        assert found.lines(index) == expected
        assert Path("run", "logs", f"instance-{index}.log").read_text().splitlines() == expected
    assert found.out.count("\n") == 80_000
    out, _ = command(*TWO, "sh", "-c", "cat; echo end").communicate(b"a\nb\n", timeout=COMMAND_S)
    lines = [b"[1,0]<stdout>:" + word for word in (b"a", b"b", b"end")]
    assert sorted(out.splitlines()) == [*lines, b"[1,1]<stdout>:end"]


def test_a_lost_host_is_reported_with_its_instances(launch: Launch, cluster: RayCluster) -> None:
    third = cluster.cluster.add_node(node_ip_address=THIRD_HOST, **SIZES)

    def lose() -> None:
        wait_until(lambda: any(b"ready" in path.read_bytes() for path in Path("runs").glob("*/logs/instance-1.log")))
        cluster.cluster.remove_node(third, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    found = launch(*TWO, "-H", f"{SECOND_HOST},{THIRD_HOST}", "sh", "-c", "echo ready; sleep 60")
    thread.join()
    assert found.code == 1
    assert f"host {THIRD_HOST} is lost, with instance 1: " in found.err
    nodes: Any = importlib.import_module("ray").nodes
    assert wait_until(lambda: not any(row["Alive"] and row["NodeManagerAddress"] == THIRD_HOST for row in nodes()))
