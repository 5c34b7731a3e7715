"""An instance that shares no disk with the coordinator writes and loads the checkpoints of the coordinator's disk."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from raypod.errors import CheckpointNotSaved
from raypod.events import (
    CallReport,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    InstanceLost,
    Repaired,
    RunEnded,
    UpdateDone,
)
from raypod.plan.plan import Plan, Segment
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.other_disks import DirectServer, Fault, unchanged

Make = Callable[..., Plan]


class OtherDisk(InlineFleet):
    """Its instance has the run folder `there`, and sees no file of the coordinator."""

    def __init__(self, plan: Plan, there: Path) -> None:
        super().__init__(on_disk(plan, there))
        self.servers: List[DirectServer] = []
        self.fault: Fault = unchanged

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `InlineFleet.call`."""
        sees_no_file = method == "has_file" or (method == "load_checkpoint" and len(arguments) == 3)
        return [False] if sees_no_file else super().call(method, *arguments)

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> DirectServer:
        """See `Fleet.serve`."""
        self.servers.append(DirectServer(kind(*arguments), lambda number, request: self.fault(number, request)))
        return self.servers[-1]


def on_disk(plan: Plan, run_dir: Path) -> Plan:
    return dataclasses.replace(plan, run_dir=str(run_dir))


class MovesToOtherDisk(OtherDisk):
    """The instance is lost after some updates, and replaced on a host with another disk."""

    lost_after = 9

    def __init__(self, plan: Plan, there: Path) -> None:
        super().__init__(plan, Path(plan.run_dir))
        self._there: Optional[Path] = there  # None once it has moved

    def call(self, method: str, *arguments: Any) -> List[Any]:
        """See `InlineFleet.call`."""
        return super().call(method, *arguments) if self._there is None else InlineFleet.call(self, method, *arguments)

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        """See `InlineFleet.run`."""
        for report in super().run(segment, stop_requested):
            yield report
            if self._there is not None and report.first_update + 1 == self.lost_after:
                raise FleetBroken((InstanceLost(0, "head", "died", "its process died", "", "", "0.log"),), "")

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        """Replace the instance; nothing has its state."""
        assert self._there is not None
        assert self._instance is not None
        self._instance.finish_saves()
        self._instance.close()
        self._plan, self._there = on_disk(self._plan, self._there), None
        environment = self._environment_before
        self.start()
        self._environment_before = environment
        return {}


def plan_for(make: Make, updates: int, **run: Any) -> Plan:
    run = {"fleet": "inline", "device": "emulated", "checkpoint_every": "4 updates", "keep_checkpoints": 2, **run}
    run["save_retry_s"] = 0
    training = {"updates": updates, "model": "tiny", "lr_schedule": "constant", "evaluate_every": 2}
    return make(training=training, pod={"num_instances": 1}, run=run)


def train(plan: Plan, fleet: InlineFleet, resumed: Optional[Checkpoint] = None) -> List[Event]:
    return list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), resumed))


def ended(events: List[Event]) -> RunEnded:
    assert isinstance(events[-1], RunEnded)
    return events[-1]


def contents(folder: Path) -> Dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_checkpoints_are_on_the_disk_of_the_coordinator(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 14)
    checkpoints = checkpoints_folder(plan.run_dir)
    here = train(plan, InlineFleet(plan))
    checkpoints.rename(tmp_path / "expected")
    fleet = OtherDisk(plan, tmp_path / "there")
    events = train(plan, fleet)
    assert contents(checkpoints) == contents(tmp_path / "expected")  # with retention, and accuracies added later
    assert ended(events) == ended(here)
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert saved == [event for event in here if isinstance(event, CheckpointSaved)]
    assert not checkpoints_folder(tmp_path / "there").exists()
    assert len(fleet.servers) == 1


def test_an_instance_that_moves_to_another_disk_loads_and_writes_there_no_checkpoint(
    make: Make, tmp_path: Path
) -> None:
    plan = plan_for(make, 14)
    whole = ended(train(plan, InlineFleet(plan)))
    shutil.rmtree(str(checkpoints_folder(plan.run_dir)))
    fleet = MovesToOtherDisk(plan, tmp_path / "there")
    events = train(plan, fleet)
    (repaired,) = (event for event in events if isinstance(event, Repaired))
    assert (repaired.seeded_from.rpartition("/")[2], repaired.update) == ("update-00000008", 8)
    assert ended(events).weights_sha256 == whole.weights_sha256
    valid, damaged = newest_valid(checkpoints_folder(plan.run_dir))
    assert valid is not None
    assert (valid.update, damaged) == (14, [])
    assert not (tmp_path / "there" / "checkpoints").exists()
    assert [set(server.methods) for server in fleet.servers] == [{"read"}, {"begin", "write", "commit"}]


def test_a_run_resumes_from_the_disk_of_the_coordinator(make: Make, tmp_path: Path) -> None:
    whole = ended(train(plan_for(make, 14), InlineFleet(plan_for(make, 14))))
    shutil.rmtree(str(tmp_path / "run"))
    train(plan_for(make, 6), OtherDisk(plan_for(make, 6), tmp_path / "there"))
    resumed, _ = newest_valid(checkpoints_folder(tmp_path / "run"))
    plan = plan_for(make, 14)
    fleet = OtherDisk(plan, tmp_path / "another")
    events = train(plan, fleet, resumed)
    assert [event.update for event in events if isinstance(event, UpdateDone)] == list(range(7, 15))
    assert ended(events).weights_sha256 == whole.weights_sha256
    assert set(fleet.servers[0].methods) == {"read"}


def test_a_failure_to_send_is_a_warning_while_an_older_checkpoint_exists(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 40)
    fleet = OtherDisk(plan, tmp_path / "there")
    events: List[Event] = []
    for event in coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)):
        events.append(event)
        if isinstance(event, CheckpointSaved) and event.update == 4:
            fleet.fault = lambda number, request: None if request[0] == "write" else request
        elif isinstance(event, CheckpointFailed):
            fleet.fault = unchanged
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    assert "differ from those that were sent" in failed[0].cause
    saved = [event.path for event in events[: events.index(failed[0])] if isinstance(event, CheckpointSaved)]
    assert failed[0].previous == saved[-1]
    assert ended(events).updates == 40


def test_a_first_checkpoint_that_cannot_be_sent_ends_the_run(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 6)
    fleet = OtherDisk(plan, tmp_path / "there")
    fleet.fault = lambda number, request: None if request[0] == "write" else request
    with pytest.raises(CheckpointNotSaved, match="there is no earlier checkpoint"):
        train(plan, fleet)
    assert newest_valid(checkpoints_folder(plan.run_dir)) == (None, [])


def test_a_checkpoints_folder_that_cannot_be_created_is_an_error_of_the_run(make: Make) -> None:
    plan = plan_for(make, 4)
    checkpoints = checkpoints_folder(plan.run_dir)
    checkpoints.touch()
    with pytest.raises(CheckpointNotSaved, match="cannot write the checkpoint .*update-00000004"):
        train(plan, InlineFleet(plan))
