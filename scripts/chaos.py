"""A long training with faults: `python scripts/chaos.py --minutes 5 --seed 1`.

Four instances under Ray train on digits while processes are killed (one, two at once, or one during the repair of
another) and frozen, inside training, pauses, checkpoints, evaluations and repairs (see chaos_faults.py), or one is
killed and the devices of the others fail, so that the run goes back to a checkpoint, until SIGTERM ends the run. Then
one instance in this process does the same updates without faults. The exit code is 0 if every update has the same loss
and accuracy, every evaluation the same result, no sample and no update is lost or recorded twice, and the weights are
bitwise equal. The last line is the summary.

With `--elastic` the instances are on two hosts, of which one ends in the middle of the time and stays lost: the run
continues with half of the replicas, and further faults. From there on the bits differ; the mean loss must not.

With `--storage` the run is mirrored to an S3 server that is killed and started again, without its content, again and
again until the end of the training. In the end the storage must have the run's files and its newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from chaos_faults import KINDS, FaultInjector, FaultyFleet, render_table  # noqa: E402 - the checkout's own
from chaos_hosts import two_hosts  # noqa: E402
from chaos_storage import URL, KilledServer, missing_packages  # noqa: E402

from raypod.events import Event, InstanceLost, Repaired, Resized, RunEnded, RunStarted, UpdateDone  # noqa: E402
from raypod.plan import layout  # noqa: E402
from raypod.plan.cluster import LOCAL, Cluster  # noqa: E402
from raypod.plan.plan import Plan, make_plan  # noqa: E402
from raypod.plan.resolve import from_values  # noqa: E402
from raypod.runs import run_folder, verify_data  # noqa: E402
from raypod.runs.metrics import MetricsAggregator  # noqa: E402
from raypod.runs.sinks import Sinks  # noqa: E402
from raypod.runs.upload.mirror import Mirror  # noqa: E402
from raypod.runtime.coordinator import coordinator  # noqa: E402
from raypod.runtime.workers.inline import InlineFleet  # noqa: E402
from raypod.runtime.workers.ray import RayFleet  # noqa: E402
from raypod.training.tasks.registry import facts_of  # noqa: E402

INSTANCES = 4
FAULTY_SHARE = 0.7  # of the time; the rest is for the faster run without faults
ENDLESS = 10_000_000
MOST_SHOWN = 10  # differences of each file
MOST_LOSS_CHANGE = 0.05  # of the mean loss, if the bits differ


def plan_for(
    folder: Path, fleet: str, updates: int, cluster: Cluster = LOCAL, storage_path: Optional[str] = None
) -> Plan:
    """Plan 4 replicas on digits; the learning rate does not depend on the number of updates."""
    run = {"device": "emulated", "fleet": fleet, "max_restarts": 100_000, "checkpoint_every": "15 updates"}
    training = {"updates": updates, "epochs": 100_000, "lr_schedule": "constant", "learning_rate": 0.02}
    pod = {"replicas": 4, "num_instances": 1 if fleet == "inline" else INSTANCES, "elastic": not cluster.is_local}
    run = {**run, "storage_path": storage_path}
    bounds = {"silent_after_s": 8, "start_timeout_s": 600}  # a machine with other load starts processes slowly
    config = from_values({"run": {**run, **bounds}, "training": {**training, "evaluate_every": 1}, "pod": pod})
    plan = make_plan(config, cluster, facts_of(config), str(folder / "run"))
    run_folder.create(plan)
    return plan


def events_of(
    plan: Plan,
    faults: Optional[FaultInjector] = None,
    within_s: float = math.inf,
    lose_host: Optional[Callable[[], None]] = None,
    storage: Optional[KilledServer] = None,
) -> List[Event]:
    """Run a plan; return its events. With `faults`, stop it after a time of training, once all faults are repaired.

    `lose_host` ends a host of the plan, after half of that time. `storage` runs until the run is mirrored.
    """
    end_s, is_stopped, is_whole = math.inf, False, True
    fleet: Any = InlineFleet(plan) if faults is None else FaultyFleet(RayFleet(plan), faults)
    found = []
    with contextlib.ExitStack() as stack:
        mirror = stack.enter_context(Mirror(plan, warn=print, print_line=print))
        sinks = stack.enter_context(Sinks(plan))
        events = stack.enter_context(contextlib.closing(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0))))
        for event in events:
            sinks.on_event(event)
            mirror.on_event(event)
            found.append(event)
            show(event)
            is_whole = is_whole or isinstance(event, Repaired)
            if isinstance(event, RunEnded) and storage is not None:
                storage.settle()
            if isinstance(event, RunStarted):
                end_s = time.monotonic() + within_s
            if faults is not None:
                is_late = time.monotonic() > end_s and lose_host is None
                if is_late:
                    faults.cancel()
                faults.handle(event, may_begin=not is_late and is_whole)
                is_due = time.monotonic() > end_s - within_s / 2 and isinstance(event, UpdateDone)
                if lose_host is not None and is_due and faults.is_idle:
                    print("  the second host is lost", flush=True)
                    lose_host()
                    lose_host, is_whole = None, False
                if is_late and faults.is_idle and isinstance(event, UpdateDone) and not is_stopped:
                    is_stopped = True
                    signal.raise_signal(signal.SIGTERM)
    return found


def show(event: Event) -> None:
    """Print a fault, a repair, or a change of the number of replicas."""
    if isinstance(event, InstanceLost):
        print(f"  lost: instance {event.instance}, {event.kind}: {event.cause}", flush=True)
    elif isinstance(event, Resized):
        print(f"  {event.replicas} replicas x accumulation {event.gradient_accumulation}: {event.cause}")
    elif isinstance(event, Repaired):
        print(f"  repaired in {event.seconds:.1f} s, after update {event.update}", flush=True)


def results_of(plan: Plan, file: str) -> Dict[int, Any]:
    """Return the results in a file of a run folder, by update: loss and accuracy."""
    lines = [json.loads(line) for line in (Path(plan.run_dir) / file).read_text().splitlines()]
    return {line["update"]: (line["loss"], line["accuracy"]) for line in lines}


def differences(what: str, disturbed: Dict[int, Any], reference: Dict[int, Any]) -> List[str]:
    """Return a line for each of the first results that differ, and a line with their number."""
    updates = sorted(set(disturbed) | set(reference))
    different = [update for update in updates if disturbed.get(update) != reference.get(update)]
    lines = [
        f"{what} of update {update}: {disturbed.get(update, 'none')} instead of {reference.get(update, 'none')}"
        for update in different[:MOST_SHOWN]
    ]
    return lines + ([f"{what}: {len(different)} of {len(updates)} differ"] if different else [])


def mean_losses(after: float, *results: Dict[int, Any]) -> Tuple[float, ...]:
    """Return the mean loss of each of several results over the updates after one."""
    return tuple(statistics.mean(loss for update, (loss, _) in each.items() if update > after) for each in results)


def compare(plan: Plan, reference: Plan, updates: int, same_until: float) -> List[str]:
    """Return how the files of a run differ from those of the run without faults.

    Every figure must be the same until the update `same_until`, and the mean loss afterwards nearly.
    """
    wrong = []
    for what, file in (("loss, accuracy", layout.METRICS), ("evaluation", layout.EVALUATIONS)):
        found, expected = results_of(plan, file), results_of(reference, file)
        if file == layout.EVALUATIONS and updates not in found:
            expected.pop(updates)  # a run that is interrupted does not evaluate its last update
        wrong += differences(f"updates of {file}", dict.fromkeys(found), dict.fromkeys(expected))
        same = [{update: each[update] for update in each if update <= same_until} for each in (found, expected)]
        wrong += differences(what, *same)
        if file == layout.METRICS and updates > same_until:
            after, expected_after = mean_losses(same_until, found, expected)
            print(f"mean loss after update {same_until:g}: {after:.4f}, without faults {expected_after:.4f}")
            if abs(after - expected_after) > MOST_LOSS_CHANGE:
                wrong.append(
                    f"the mean loss after update {same_until:g} is {after:.4f} instead of {expected_after:.4f}"
                )
    return wrong


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="about how long it takes")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--elastic", action="store_true", help="on two hosts, of which one is lost for good")
    parser.add_argument("--storage", action="store_true", help="mirrored to a server that is killed again and again")
    args = parser.parse_args()
    if args.storage and missing_packages():
        parser.error(f"--storage needs {', '.join(missing_packages())}: pip install 'raypod[dev,s3]'")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        device_fault = Path(folder, "device-fault")
        os.environ["EMULATED_POD_DEVICE_FAULT"] = f"@{device_fault}"  # before any process of Ray starts
        cluster, lose = stack.enter_context(two_hosts()) if args.elastic else (LOCAL, None)
        storage = KilledServer(args.seed) if args.storage else None
        if storage is not None:
            stack.enter_context(storage.running())
        plan = plan_for(Path(folder, "faulty"), "ray", ENDLESS, cluster, URL if storage else None)
        faults = FaultInjector(plan, args.seed, device_fault)
        print(f"with faults (seed {args.seed})", flush=True)
        disturbed = events_of(plan, faults, FAULTY_SHARE * 60 * args.minutes, lose, storage)
        verdict = verify_data.verify(Path(plan.run_dir))
        ended = next(event for event in disturbed if isinstance(event, RunEnded))
        print(f"{ended.updates} updates, without faults", flush=True)
        undisturbed_plan = plan_for(Path(folder, "reference"), "inline", ended.updates)
        expected = next(event for event in events_of(undisturbed_plan) if isinstance(event, RunEnded))
        resized = [event.update for event in disturbed if isinstance(event, Resized)]
        wrong = [line for line in verdict.lines if line.startswith("NOT PROVED: ")]
        wrong += compare(plan, undisturbed_plan, ended.updates, resized[0] if resized else math.inf)
        if storage is not None:
            wrong += storage.differences(Path(plan.run_dir))
            print(f"the storage server was killed {storage.kills} times")
    if len(resized) != args.elastic:
        wrong.append(f"the run has changed its size {len(resized)} times")
    if faults.repaired != faults.injected:
        wrong.append(f"{sum(faults.injected.values()) - sum(faults.repaired.values())} faults were not repaired")
    print("".join(f"{line}\n" for line in [*wrong, render_table(faults)]), end="")
    return summarize(plan, disturbed, faults, wrong, ended.weights_sha256 == expected.weights_sha256)


def rollbacks(events: List[Event]) -> List[Tuple[int, int]]:
    """Return the update before and after each repair that went back to a checkpoint, as failed devices require."""
    found, update = [], 0
    for event in events:
        update = event.update if isinstance(event, UpdateDone) else update
        if isinstance(event, Repaired):
            found += [(update, event.update)] if event.update < update else []
            update = event.update
    return found


def summarize(plan: Plan, events: List[Event], faults: FaultInjector, wrong: List[str], is_equal: bool) -> int:
    """Print the summary; return the exit code."""
    done = [event.update for event in events if isinstance(event, UpdateDone)]
    updates, samples = max(done), plan.geometry.global_batch_size
    again = sum(after - update for after, update in rollbacks(events))
    lost, repeated = (updates - len(set(done))) * samples, (len(done) - len(set(done))) * samples
    repairs = sum(isinstance(event, Repaired) for event in events)
    by_kind = {kind: sum(count for (of, _), count in faults.injected.items() if of == kind) for kind in KINDS}
    kinds = ", ".join(f"{kind} {count}" for kind, count in by_kind.items())
    resized = [event for event in events if isinstance(event, Resized)]
    expected = "DIFFERENT" if not resized else f"different since update {resized[0].update}, as expected"
    print(
        f"chaos: {sum(faults.injected.values())} faults injected ({kinds}), {repairs} repairs, {updates} updates, "
        f"{again} computed again after rollbacks, samples lost {lost}, samples repeated {repeated}, "
        f"differences {len(wrong)}, hash {'equal' if is_equal else expected}"
    )
    return 0 if is_equal != bool(resized) and not lost and not repeated and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
