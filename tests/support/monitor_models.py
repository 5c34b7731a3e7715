"""Runs as a status endpoint describes them, for the tests of `raypod monitor`."""

from __future__ import annotations

import time
from typing import Any, Dict

from raypod.observe.monitor.model import Run
from raypod.observe.monitor.run_source import run_of

BUSY_S = (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.19)  # instance 7 is slow


def instance(index: int, **changed: Any) -> Dict[str, Any]:
    """Return an instance with 2 replicas of 1 IPU; four of them are on a host."""
    calls = {"p50_s": 0.2, "p95_s": 0.25, "slowest_s": 1.5, "mean_s": 0.2, "busy_s": BUSY_S[index]}
    calls.update(data_wait_share=0.01 * index, peer_wait_share=0.5, busy_ratio=BUSY_S[index] / 0.1)
    process = {"instance": index, "host": f"10.0.0.{11 + index // 4}", "pid": 1000 + index, "state": "training"}
    activity = {"activity": "in call 41", "activity_s": 0.1, "waits_for_others": index != 7, "calls": 42, "cpu_s": 4.2}
    log = {"log_file": f"/runs/a/logs/instance-{index}.log", "log_line": None}
    places = {"replicas": [2 * index, 2], "ipus": [2 * index, 2]}
    rates = {"heartbeat_age_s": 0.2, "samples_per_s": 160.0, "call_s": calls}
    return {**process, **activity, **log, **places, **rates, **changed}


def usage(**changed: Any) -> Dict[str, Any]:
    """Return the usage of a host."""
    sizes = {"memory_used_bytes": 12e9, "memory_total_bytes": 64e9, "disk_used_bytes": 5e11, "disk_total_bytes": 1e12}
    return {"cpu_share": 0.42, "network_received_bytes": 1000, "network_sent_bytes": 2000, **sizes, **changed}


def snapshot(**changed: Any) -> Dict[str, Any]:
    """Return the snapshot of a run with 8 instances on 2 hosts."""
    now_s = time.time()

    def event(after_s: float, name: str, **fields: Any) -> Dict[str, Any]:
        return {"unix_s": now_s - 100 + after_s, "event": name, **fields}

    lost = {"instance": 3, "host": "10.0.0.11", "kind": "died", "cause": "signal 9", "activity": "in call 9"}
    repaired = {"lost": [3], "hosts": ["10.0.0.11"], "seeded_from": "instance 0", "update": 9, "restarts": 1}
    process = {"version": 1, "kind": "training", "unix_s": now_s, "started_unix_s": now_s - 100, "host": "10.0.0.11"}
    run = {"pid": 999, "user": "ada", "run_dir": "/runs/a", "task": "image-classification", "device": "ipu"}
    progress = {"phase": "training", "phase_s": 3.0, "update": 250, "total_updates": 1000, "epoch": 2, "epochs": 8.0}
    rates = {"samples_are": "images", "samples_per_s": 1280.0, "part_rates": {}, "data_wait_share": 0.03}
    counts = {"last_update_unix_s": now_s, "restarts": 1, "generation": 2, "eta_s": 300.0, "plan": {}}
    saved = {"update": 200, "path": "/runs/a/x", "unix_s": now_s - 20}
    tested = {"update": 200, "epoch": 1, "metrics": {"loss": 0.4, "accuracy": 90.5}, "unix_s": now_s}
    recent = {"update": [247, 248, 249, 250], "samples_per_s": [1200.0, 1300.0, 1250.0, 1280.0]}
    return {
        **process,
        **run,
        **progress,
        **rates,
        **counts,
        "device_line": "Poplar SDK 3.3",
        "metrics": {"loss": 0.5, "accuracy": 81.0},
        "checkpoints": {"saved": 2, "failed": 0, "last": saved},
        "last_evaluation": tested,
        "instances": [instance(index) for index in range(8)],
        "hosts": {"10.0.0.11": usage(), "10.0.0.12": None},
        "recent_updates": {**recent, "loss": [0.8, None, 0.6, 0.5], "accuracy": [70.0, 75.0, 80.0, 81.0]},
        "events": [
            event(10, "run_started", generation=1, first_update=0),
            event(50, "instance_lost", **lost),
            event(55, "repaired", **repaired, seconds=4.5, generation=2),
            event(80, "checkpoint_saved", update=200, path="/c/update-200", weights_sha256="ab"),
            event(81, "evaluation_done", update=200, metrics={"accuracy": 90.5}, samples=360),
        ],
        **changed,
    }


def make_run(**changed: Any) -> Run:
    """Return the run of `snapshot`."""
    return run_of(snapshot(**changed))
