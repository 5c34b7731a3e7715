"""Resets, the folder of executables with the locks of PopTorch, and the cores of an instance."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Tuple

import poptorch
import pytest

from raypod.plan.plan import Plan
from raypod.runtime.worker import devices, environment
from raypod.runtime.worker.environment import take_cores
from raypod.runtime.worker.process import InstanceProcess
from raypod.system import cores
from raypod.system.sdk import Sdk
from raypod.training.models import program


@pytest.mark.parametrize(
    ("command", "timeout_s", "reason"),
    [
        ("echo; echo no such partition; exit 3", 60, "exit code 3: no such partition"),
        ("exit 4", 60, "exit code 4: no output"),
        ("sleep 600 & sleep 600", 0.2, "not done within 0.2 s (run.reset_timeout_s)"),
    ],
)
def test_a_reset_command_knows_the_action_and_one_that_fails_says_why(
    processes: Any, command: str, timeout_s: float, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert devices.reset(command, "IPU_RESET", timeout_s) == reason
    capfd.readouterr()
    command = f'echo "$RAYPOD_RECOVERY_ACTION" | tee {tmp_path / "action"}; cat'
    assert devices.reset(command, "PARTITION_RESET", 60.0) == ""
    assert (tmp_path / "action").read_text() == "PARTITION_RESET\n"
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"reset of the devices (PARTITION_RESET): {command}", "PARTITION_RESET"]


NAME = "0" * 32 + ".lock"


@pytest.mark.parametrize(
    ("device", "pod", "inherited", "expected"),
    [
        ("ipu", {}, None, "{folder}/raypod/executables/{host}"),
        ("ipu", {}, "/inherited", "/inherited"),
        ("ipu", {"executable_cache_path": "/chosen"}, "/inherited", "/chosen"),
        ("emulated", {"executable_cache_path": "/chosen"}, None, "/chosen"),
        ("emulated", {}, None, None),
    ],
)
def test_the_folder_is_of_this_user_and_host_unless_another_one_is_chosen(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, pod: Any, inherited: Any, expected: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)
    if inherited:
        monkeypatch.setenv("POPTORCH_CACHE_DIR", inherited)
    plan = make(pod=pod)
    folder = devices.executable_folder(plan, Sdk(device, ""))
    assert folder == (expected and expected.format(folder=tmp_path, host=socket.gethostname()))
    assert Path(tmp_path, "raypod").exists() is (folder is not None and folder.startswith(str(tmp_path)))
    for options in (program.training_options(plan, folder), program.inference_options(plan, folder)):
        assert options._Popart.options.get("cachePath", "") == (folder or inherited or "")


def test_a_folder_that_cannot_be_made_is_a_warning(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raypod").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POPTORCH_CACHE_DIR", raising=False)
    with pytest.warns(UserWarning, match=r"Not a directory\); choose a folder with --executable-cache-path"):
        assert devices.executable_folder(make(), Sdk("ipu", "")) is None


def compiles(folder: Path, processes: int) -> bool:
    """Return whether a process compiles by PopTorch's lock, which counts the processes of all hosts."""
    path = folder / NAME
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("0")
        file.flush()
        position = path.stat().st_size
    if position == processes:
        path.unlink()
    return position == 1


def test_one_process_of_a_host_compiles_at_each_start(tmp_path: Path) -> None:
    for _ in range(3):
        for _ in range(2):  # the instances of this host
            devices.remove_stale_locks(str(tmp_path))
        assert [compiles(tmp_path, processes=4) for _ in range(2)] == [True, False]
    with (tmp_path / NAME).open() as file:  # another run compiles
        fcntl.flock(file, fcntl.LOCK_EX)
        devices.remove_stale_locks(str(tmp_path))
        assert (tmp_path / NAME).exists()
    (tmp_path / "poetry.lock").touch()  # of another program, in a folder that is not for executables alone
    devices.remove_stale_locks(str(tmp_path))
    assert [path.name for path in tmp_path.glob("*.lock")] == ["poetry.lock"]
    devices.remove_stale_locks(None)


AT_A_TIME, CPUS = "EMULATED_POD_REPLICAS_AT_A_TIME", "EMULATED_POD_REPLICA_CPUS"
Taken = Callable[[Plan, int], Tuple[List[List[int]], Dict[str, str]]]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """A function that takes the cores of an instance on a host of 2 nodes with 4 cores; returns what it changed."""
    host = [cores.Core(cpu // 4, (cpu,)) for cpu in range(8)]
    monkeypatch.setattr(cores, "usable_cores", lambda: host)

    def take(plan: Plan, index: int) -> Tuple[List[List[int]], Dict[str, str]]:
        bound: List[List[int]] = []
        monkeypatch.setattr(environment, "bind_process", bound.append)
        for name in (AT_A_TIME, CPUS):
            monkeypatch.setenv(name, "inherited")
            monkeypatch.delenv(name)
        take_cores(plan.placement, plan.placement.instances[index])
        return bound, {name: os.environ[name] for name in (AT_A_TIME, CPUS) if name in os.environ}

    return take


def test_instances_share_the_cpus_of_their_host(make: Callable[..., Plan], taken: Taken) -> None:
    plan = make(pod={"replicas": 16, "num_instances": 2})
    assert taken(plan, 0) == ([], {AT_A_TIME: "4"})  # 2 x 4 threads on 8 cores, not 2 x 8
    assert taken(make(pod={"replicas": 2, "num_instances": 2}), 1) == ([], {AT_A_TIME: "1"})
    assert taken(make(pod={"replicas": 4, "num_instances": 2, "threads_per_replica": 4}), 1)[1] == {AT_A_TIME: "1"}
    assert taken(make(pod={"replicas": 32, "num_instances": 16}), 15)[1] == {AT_A_TIME: "1"}


def test_bound_instances_have_their_own_cores(make: Callable[..., Plan], taken: Taken) -> None:
    plan = make(pod={"replicas": 8, "num_instances": 4, "bind_cores": True})
    found = [taken(plan, index) for index in range(4)]
    assert [bound for bound, _ in found] == [[[0, 1]], [[4, 5]], [[2, 3]], [[6, 7]]]
    assert [variables[CPUS] for _, variables in found] == ["0;1", "4;5", "2;3", "6;7"]
    # An instance that is alone on its host has all its cores, and its replicas are spread over the nodes.
    alone = make(pod={"replicas": 2, "num_instances": 1, "bind_cores": True})
    assert taken(alone, 0) == ([], {CPUS: "0,1,2,3;4,5,6,7"})


def test_the_release_of_a_device_may_fail_after_the_device_has_failed() -> None:
    error = poptorch.UnrecoverableError("the weights cannot be read")

    def destroy() -> None:
        raise error

    models = [SimpleNamespace(isCompiled=lambda: True, destroy=destroy)]
    guard = devices.CallGuard()
    with pytest.raises(poptorch.UnrecoverableError, match="cannot be read"):
        guard.destroy(models)
    with pytest.raises(poptorch.UnrecoverableError), guard:
        raise error
    guard.destroy(models)


def test_the_clock_of_an_instance_is_that_of_its_host() -> None:
    before = time.monotonic()
    assert before <= InstanceProcess.clock(object.__new__(InstanceProcess)) <= time.monotonic()
