"""The fault `device` of chaos.py, and the updates that it repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chaos
import pytest
from chaos_faults import Fault, FaultInjector

from raypod.events import Repaired, UpdateDone


def repaired(update: int) -> Repaired:
    return Repaired((0, 1), ("a", "b"), "a checkpoint", update, 1.0, 1, 2)


def test_devices_fail_from_the_fault_to_the_repair(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device_fault = tmp_path / "device-fault"
    faults = FaultInjector(make(), 1, device_fault)
    monkeypatch.setattr(faults, "_fault", Fault("device", "training", (1,), 0, 0.0))
    monkeypatch.setattr(faults, "_send", lambda number, instance: device_fault.read_text() == "unusable")
    faults._send_fault()
    assert faults.injected == {("device", ""): 1}
    faults.handle(repaired(3), may_begin=False)
    assert not device_fault.exists()


def test_updates_after_a_rollback_are_counted() -> None:
    done = [UpdateDone(update, 1, {"loss": 1.0}, 8 * update, 1.0, 1.0) for update in (1, 2, 3)]
    events = [*done[:2], repaired(2), *done[2:], repaired(1), repaired(1)]  # an update is recorded once
    assert chaos.rollbacks(events) == [(3, 1)]
