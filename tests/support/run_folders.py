"""Run folders that no run has written, for tests of what reads them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, Dict, List

START_UNIX_S = 1_700_000_000.0
STEP_S = 0.01
VERSIONS = {"python": "3.11.7", "raypod": "0.1.0", "torch": "2.13.0"}


def update_record(update: int, loss: float) -> Dict[str, Any]:
    """Return a line of `metrics.jsonl`."""
    rates = {"samples_per_s": 1000.0 + update % 7, "time_s": 5 + STEP_S * update, "data_wait_share": 0.02}
    return {"update": update, "epoch": 1, "loss": loss, "accuracy": 50.0, "samples": 8 * update, **rates}


def write_run(
    folder: Path, updates: int = 60, instances: int = 2, seed: int = 0, learning_rate: float = 0.1
) -> List[Dict[str, Any]]:
    """Write the folder of a finished run that lost instance 1 once; return the lines of `metrics.jsonl`."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    lines = [update_record(update, 2.0 / math.sqrt(update) + 0.1 * rng.random()) for update in range(1, updates + 1)]
    write_lines(folder / "metrics.jsonl", lines)
    evaluated = [{"samples": 100, "loss": 0.5, "accuracy": 80.0, "update": update, "epoch": 1} for update in (20, 40)]
    write_lines(folder / "evaluations.jsonl", evaluated)
    write_lines(folder / "events.jsonl", _events(updates, instances))
    (folder / "plan.json").write_text(json.dumps(_plan(updates, instances)))
    training = f"training:\n  execution: pipelined\n  learning_rate: {learning_rate}\n"
    (folder / "config.yaml").write_text(f"task:\n  name: image-classification\n{training}")
    state = {"pid": 1, "started_ticks": 0, "host": "host-a", "state": "done", "exit_code": 0}
    (folder / "state.json").write_text(json.dumps({**state, "update": updates, "total_updates": updates}))
    summary = {"samples_per_s": 1003.0, "data_wait_share": 0.02, "seconds_to_first_update": 6.5}
    (folder / "summary.json").write_text(json.dumps({**summary, "weights_sha256": "ab" * 32, "evaluations": evaluated}))
    return lines


def write_lines(path: Path, records: List[Dict[str, Any]]) -> None:
    """Write a JSON Lines file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def event(at_s: float, name: str, **fields: Any) -> Dict[str, Any]:
    """Return a line of `events.jsonl`, `at_s` seconds after the start."""
    return {"unix_s": START_UNIX_S + at_s, "event": name, **fields}


def call_times(at_s: float, first_update: int, calls: int, busy_s: List[float]) -> Dict[str, Any]:
    """Return a line of `events.jsonl` with the calls of a window, per instance of length `busy_s`."""
    most_s = max(busy_s)
    times = {"p50_s": most_s, "p95_s": 1.5 * most_s, "slowest_s": 2 * most_s, "mean_s": most_s, "data_wait_share": 0.1}
    found = [
        {"instance": index, **times, "busy_s": each, "busy_ratio": None, "peer_wait_share": 1 - each / most_s}
        for index, each in enumerate(busy_s)
    ]
    return event(at_s, "call_times", first_update=first_update, calls=calls, window_s=10.0, instances=found)


def _started(instances: int) -> List[Dict[str, Any]]:
    both = {"seconds": {"load data": 0.5, "build model": 0.1}, "versions": VERSIONS}
    return [{"instance": index, "host": _host(index), "pid": 100 + index, **both} for index in range(instances)]


def _host(instance: int) -> str:
    return f"host-{'ab'[instance % 2]}"


def _events(updates: int, instances: int) -> List[Dict[str, Any]]:
    middle, seconds = updates // 2, {"start the instances": 4.0}
    device = {"device": "emulated", "device_line": "emulated SDK", "parameters": 1000, "first_update": 0}
    busy_s = [0.01] * (instances - 1) + [0.02]
    lost = {"instance": 1, "host": "host-b", "kind": "died", "cause": "killed by signal 9 </script><b>", "activity": ""}
    repair = {"lost": [1], "hosts": ["host-c"], "seeded_from": "instance 0", "update": middle, "restarts": 1}
    saved = {"update": 20, "path": "/runs/x/checkpoints/update-00000020", "weights_sha256": "ab" * 32}
    ended = {"updates": updates, "interrupted": False, "cause": "", "weights_sha256": "ab" * 32}
    return [
        event(0, "process_started", pid=1, host="host-a", raypod="0.1.0", total_updates=updates),
        event(5, "run_started", **device, generation=1, seconds=seconds, instances=_started(instances)),
        event(5, "phase_begun", phase="training", update=0),
        event(8, "checkpoint_begun", update=20),
        event(8.5, "checkpoint_saved", **saved),
        event(9, "evaluation_done", update=20, metrics={"loss": 0.5, "accuracy": 80.0}, samples=100),
        call_times(15, 0, middle, busy_s),
        event(16, "instance_lost", **lost),
        event(16, "phase_begun", phase="repairing", update=middle),
        event(18, "repaired", **repair, seconds=2.0, generation=2, instances=_started(instances)),
        event(18, "phase_begun", phase="training", update=middle),
        call_times(28, middle, updates - middle, busy_s),
        event(28, "run_ended", **ended),
    ]


def _plan(updates: int, instances: int) -> Dict[str, Any]:
    geometry = {"num_instances": instances, "total_replicas": instances, "total_ipus": 2 * instances}
    geometry.update(ipus_per_replica=2, gradient_accumulation=8, micro_batch_size=4, global_batch_size=8)
    replica = {"local_replicas": 1}
    return {
        "cluster": {"name": "test pod", "hosts": [{"name": f"host-{letter}"} for letter in "abc"]},
        "geometry": {**geometry, "device_iterations": 1},
        "task": "image-classification",
        "dataset": {"name": "digits", "train_samples": 1437, "test_samples": 360},
        "updates_per_epoch": updates,
        "total_updates": updates,
        "legs": [{"epoch": 0}],
        "instances": [{"index": k, "host": _host(k), "replica_offset": k, **replica} for k in range(instances)],
        "pipeline_splits": ["block2", "head=0"],
    }
