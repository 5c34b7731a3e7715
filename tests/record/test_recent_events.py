"""Events in memory: routine ones do not displace the others."""

from __future__ import annotations

from raypod.record.recent_events import RecentEvents


def test_many_epochs_and_checkpoints_do_not_displace_a_repair() -> None:
    recent = RecentEvents(3)
    recent.append({"event": "run_started", "first_update": 0})
    for epoch in range(5):
        recent.append({"event": "epoch_done", "epoch": epoch})
        if epoch == 3:
            recent.append({"event": "repaired", "update": 7})
    kept = [(each["event"], each.get("epoch")) for each in recent.records()]
    epochs = [("epoch_done", 2), ("epoch_done", 3), ("repaired", None), ("epoch_done", 4)]
    assert kept == [("run_started", None), *epochs]
    for update in range(4):
        recent.append({"event": "repaired", "update": update})
    repairs = [each["update"] for each in recent.records() if each["event"] == "repaired"]
    assert repairs == [1, 2, 3]  # the newest
