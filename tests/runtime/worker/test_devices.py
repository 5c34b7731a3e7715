"""The process of an instance: the reset command of the user, the release of its devices, its clock."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import poptorch
import pytest

from raypod.runtime.worker import devices
from raypod.runtime.worker.process import InstanceProcess


def test_a_reset_command_knows_the_action_and_writes_into_the_log(
    processes: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = f'echo "$RAYPOD_RECOVERY_ACTION" | tee {tmp_path / "action"}; cat'
    assert devices.reset(command, "PARTITION_RESET", 60.0) == ""
    assert (tmp_path / "action").read_text() == "PARTITION_RESET\n"
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"reset of the devices (PARTITION_RESET): {command}", "PARTITION_RESET"]


@pytest.mark.parametrize(
    ("command", "timeout_s", "reason"),
    [
        ("echo; echo no such partition; exit 3", 60, "exit code 3: no such partition"),
        ("exit 4", 60, "exit code 4: no output"),
        ("sleep 600 & sleep 600", 0.2, "not done within 0.2 s (run.reset_timeout_s)"),
    ],
)
def test_a_reset_command_that_fails_or_does_not_end_says_why(
    processes: Any, command: str, timeout_s: float, reason: str
) -> None:
    assert devices.reset(command, "IPU_RESET", timeout_s) == reason


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
