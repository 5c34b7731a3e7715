"""Checkpoints on the disks of other hosts: copies of the newest one, and instances on another disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from raypod.errors import CheckpointNotSaved, ConfigError
from raypod.events import (
    CallReport,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    InstanceLost,
    Repaired,
    RunEnded,
    RunStarted,
)
from raypod.plan import compatibility, layout
from raypod.plan.plan import Plan, Segment
from raypod.runs import run_folder, run_state, verify_data
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.run_view import RunView
from raypod.runs.sinks import Sinks
from raypod.runs.upload.copies import CheckpointCopies
from raypod.runs.upload.copy_folder import held_copies
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.fleet import FleetBroken
from raypod.runtime.workers.inline import InlineFleet
from raypod.system import files
from raypod.training.checkpoint import resume
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.checkpoint.resume import newest_valid
from raypod.training.checkpoint.storage import checkpoints_folder
from tests.support.bounded import wait_until
from tests.support.other_disks import DirectServer, Fault, Request, unchanged
from tests.support.saved_runs import contents, save, weights_of
from tests.support.saved_runs import run as run_here
from tests.support.scripted_runs import events_of, of, only, updates_of

Make = Callable[..., Plan]
STARTED = RunStarted("emulated", "", 0, 1, ())


class Hosts(InlineFleet):
    """Further hosts, each with a folder as its disk; `faults` are those of the requests to them."""

    def __init__(self, plan: Plan, root: Path, names: str, shared: Tuple[str, ...] = ()) -> None:
        """The disk of the hosts `shared` is one."""
        super().__init__(plan)
        self.names, self._root, self._shared = names.split(), root, shared
        self.faults: Dict[str, Fault] = {}
        self.servers: List[Tuple[str, DirectServer]] = []

    def peers(self) -> List[str]:
        return list(self.names)

    def serve_on(self, host: str, kind: Callable[..., Any], *arguments: Any) -> DirectServer:
        served = kind(str(self.disk(host)), *arguments[1:])
        server = DirectServer(served, lambda number, request: self.faults.get(host, unchanged)(number, request))
        self.servers.append((host, server))
        return server

    def disk(self, host: str) -> Path:
        return self._root / ("shared" if host in self._shared else host)

    def held(self, host: str) -> List[int]:
        return [age[1] for run in self.disk(host).glob("*") for age, _ in held_copies(run)]


class Session:
    """The copies of a run that writes checkpoints of a small state."""

    def __init__(self, make: Make, root: Path, names: str, number: int = 2, **settings: Any) -> None:
        left_s = settings.pop("left_s", None)
        self.plan = make(run={"checkpoint_copies": number}, pod={"num_instances": 1})
        self.fleet = Hosts(self.plan, root, names, **settings)
        self.warnings: List[str] = []
        folder = Path(self.plan.run_dir)
        folder.mkdir(exist_ok=True)
        state = run_state.RunState(1, 2, "head", run_state.RUNNING, 0, 200)
        (folder / layout.STATE).write_text(json.dumps(vars(state)))
        disk, warn = str(self.fleet.disk("head")), self.warnings.append
        self.copies = CheckpointCopies(self.plan, self.fleet, warn, lambda line: None, lambda: left_s, disk)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.copies)

    def start(self) -> Session:
        self.copies.on_event(STARTED)
        return self

    def save(self, update: int) -> Checkpoint:
        checkpoint = save(self.plan, update, keep=2)
        began_s = time.monotonic()
        self.copies.on_event(CheckpointSaved(update, str(checkpoint.path), ""))
        assert time.monotonic() - began_s < 5, "the run waits for copies"
        return checkpoint

    def is_held(self, host: str, update: int) -> bool:
        return wait_until(lambda: self.fleet.held(host) == [update])

    def end(self, interrupted: bool = False) -> Dict[str, Any]:
        self.copies.on_event(RunEnded(0, interrupted, "", None))
        found: Dict[str, Any] = self.copies.summary()["checkpoint_copies"]
        self.close()
        return found

    def close(self) -> None:
        self._stack.close()
        assert not [each for each in threading.enumerate() if each.name == "checkpoint copies"]


Open = Callable[..., Session]


@pytest.fixture
def copying(make: Make, tmp_path: Path) -> Iterator[Open]:
    """`copying("b c", number)`: copies of a run on these hosts and the coordinator's."""
    found: List[Session] = []

    def build(names: str, number: int = 2, **settings: Any) -> Session:
        found.append(Session(make, tmp_path / "hosts", names, number, **settings))
        return found[-1].start()

    yield build
    for each in found:
        each.close()


def test_the_newest_checkpoint_is_kept_on_so_many_hosts(copying: Open) -> None:
    run = copying("b c d", 3)
    for update in (44, 88):
        run.save(update)
        assert run.is_held("b", update)
        assert run.is_held("c", update)
    summary = run.end()
    assert (summary["checkpoint"], summary["wanted"], summary["held"]) == ("update-00000088", 3, 3)
    assert (summary["hosts"][1:], summary["failed"]) == (["b", "c"], 0)
    assert not run.fleet.disk("d").exists()
    assert run.warnings == []
    for host in ("b", "c"):
        (folder,) = run.fleet.disk(host).iterdir()
        assert folder.name == summary["run_id"]
        assert {path.name for path in folder.iterdir()} == {"000001-00000088", "ended"}
        assert (folder / "ended").read_text() == "000001-00000088"


def fail_from(first: int) -> Fault:
    def fault(number: int, request: Request) -> Optional[Request]:
        if number >= first:
            raise ConnectionError("the host is lost")
        return request

    return fault


@pytest.mark.parametrize("first", [1, 2, 4, 7])
def test_another_host_takes_the_place_of_one_that_is_lost_in_a_transfer(copying: Open, first: int) -> None:
    run = copying("b c")
    run.fleet.faults["b"] = fail_from(first)
    run.save(44)
    assert run.is_held("c", 44)
    run.fleet.faults.clear()  # b returns
    run.save(88)
    assert run.is_held("c", 88)
    summary = run.end(interrupted=True)
    assert (summary["hosts"][1:], summary["failed"]) == (["c"], 1)
    (warning,) = run.warnings
    assert warning == "update-00000044 is not copied to host b, the next host takes its place: the host is lost"
    assert run.fleet.held("b") == []
    (folder,) = run.fleet.disk("c").iterdir()
    assert not (folder / "ended").exists()  # an interrupted run


def test_a_host_that_keeps_failing_is_a_warning_and_is_tried_again_with_the_next_checkpoint(copying: Open) -> None:
    run = copying("b")
    run.fleet.faults["b"] = fail_from(4)
    run.save(44)
    assert wait_until(lambda: len(run.fleet.servers) == 2)  # each checkpoint is tried twice
    run.save(88)
    assert wait_until(lambda: len(run.fleet.servers) == 4)
    run.fleet.faults.clear()
    run.save(132)
    assert run.is_held("b", 132)
    assert (run.end()["held"], len(run.warnings)) == (2, 2)
    assert "is not copied to host b" in run.warnings[0]
    words = "update-00000044 is on 1 of 2 hosts (--checkpoint-copies): no other host can keep a copy at the moment"
    assert run.warnings[1] == words


def is_paused_in(method: str, arrived: threading.Event, released: threading.Event) -> Fault:
    def wait(number: int, request: Request) -> Request:
        if request[0] == method:
            arrived.set()
            assert released.wait(60)
        return request

    return wait


def test_the_newest_checkpoint_wins_while_a_host_is_slow(copying: Open) -> None:
    run, released, arrived = copying("b"), threading.Event(), threading.Event()
    run.fleet.faults["b"] = is_paused_in("commit", arrived, released)
    run.save(44)
    assert arrived.wait(60)
    for update in (88, 132, 176):  # retention removes the one that is being sent: its files are open
        run.save(update)
    assert not Path(run.plan.run_dir, "checkpoints", "update-00000044").exists()
    released.set()
    assert run.is_held("b", 176)
    ((_, server),) = run.fleet.servers
    assert server.methods.count("finish") == 2  # 44 and 176
    assert (run.end()["held"], run.warnings) == (2, [])


def test_a_checkpoint_that_is_removed_or_damaged_here_is_no_fault_of_the_other_host(copying: Open) -> None:
    run = copying("b c")
    removed = save(run.plan, 44)
    files.remove_folder(removed.path)
    run.copies.on_event(CheckpointSaved(44, str(removed.path), ""))
    run.save(88)
    assert run.is_held("b", 88)
    assert (run.copies._failed, run.warnings) == (0, [])
    damaged = save(run.plan, 132)
    weights = damaged.path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    run.copies.on_event(CheckpointSaved(132, str(damaged.path), ""))
    assert wait_until(lambda: run.copies._failed == 1)
    run.save(176)
    assert run.is_held("b", 176)
    assert run.end()["hosts"][1:] == ["b"]
    (warning,) = run.warnings
    assert "update-00000132 is not copied to other hosts" in warning
    assert "the SHA-256 of weights.safetensors does not match" in warning


def test_the_end_of_the_run_waits_for_a_limited_time(copying: Open) -> None:
    run, released = copying("b", left_s=0.3), threading.Event()
    run.fleet.faults["b"] = is_paused_in("commit", threading.Event(), released)
    run.save(44)
    run.copies.on_event(RunEnded(44, False, "", None))
    released.set()
    summary = run.copies.summary()["checkpoint_copies"]
    assert (summary["checkpoint"], summary["held"]) == ("update-00000044", 1)
    assert run.warnings == ["the last checkpoint is not copied to other hosts within 0 s"]


def test_fewer_hosts_than_copies_are_a_warning_and_without_copies_nothing_is_started(copying: Open) -> None:
    run = copying("b", 3)
    run.save(44)
    assert run.is_held("b", 44)
    assert run.end()["held"] == 2
    first, second = run.warnings
    assert first.startswith("--checkpoint-copies 3: only 1 other host is alive, so there are fewer copies until")
    assert second.startswith("update-00000044 is on 2 of 3 hosts")
    files.remove_folder(Path(run.plan.run_dir))
    run = copying("b", 1)
    run.save(44)
    assert (run.copies.summary(), run.fleet.servers) == ({}, [])
    assert not Path(run.plan.run_dir, layout.COPIES).exists()


def test_hosts_with_one_disk_count_as_one(copying: Open) -> None:
    run = copying("b c d e", 3, shared=("b", "c", "head"))
    run.save(44)
    assert run.is_held("e", 44)
    assert run.end()["hosts"][1:] == ["d", "e"]
    said = [each.partition(":")[0] for each in run.warnings]
    assert said == [f"host {host} keeps no copies of checkpoints" for host in ("b", "c")]
    assert "is that of the coordinator's host" in run.warnings[0]
    assert not list(run.fleet.disk("b").rglob("*.host"))


def test_a_copy_that_a_host_has_already_is_not_sent_again(copying: Open) -> None:
    first = copying("b")
    first.save(44)
    assert first.is_held("b", 44)
    identity = first.end(interrupted=True)["run_id"]
    again = copying("b")
    assert again.end()["held"] == 2
    ((_, server),) = again.fleet.servers
    assert server.methods == ["open", "end", "close"]
    assert again.copies.summary()["checkpoint_copies"]["run_id"] == identity


@pytest.mark.parametrize(
    ("fleet", "hosts", "words"),
    [
        ("inline", 3, "the inline fleet uses one: omit --fleet inline, or use 1"),
        ("ray", 1, "the run has 1: name more in a --cluster file, or use 1"),
        ("ray", 2, "the run has 2: use at most 2"),
        ("ray", 3, ""),
    ],
)
def test_copies_that_no_host_of_the_plan_can_keep_are_rejected(make: Make, fleet: str, hosts: int, words: str) -> None:
    config = make(run={"checkpoint_copies": 3, "fleet": fleet}, pod={"num_instances": 1}).config
    with contextlib.ExitStack() as stack:
        if words:
            stack.enter_context(pytest.raises(ConfigError, match=f"^--checkpoint-copies 3 needs 3 hosts, and {words}$"))
        compatibility.check_copies(config, hosts)


def test_a_run_continues_from_a_copy_with_the_same_weights(make: Make, tmp_path: Path) -> None:
    def plan_for(updates: int, **run: Any) -> Plan:
        settings = {"fleet": "inline", "device": "emulated", "checkpoint_every": "4 updates", **run}
        training = {"updates": updates, "model": "tiny", "lr_schedule": "constant", "evaluate_every": 2}
        return make(training=training, pod={"num_instances": 1}, run=settings)

    whole = weights_of(run_here(plan_for(14)))
    files.remove_folder(Path(plan_for(14).run_dir))
    plan = plan_for(14, checkpoint_copies=2)
    run_folder.create(plan)
    fleet = Hosts(plan, tmp_path / "hosts", "b")
    copies = CheckpointCopies(plan, fleet, pytest.fail, lambda line: None, folder=str(fleet.disk("head")))
    state = run_state.StateFile(Path(plan.run_dir), RunView(plan))
    with Sinks(plan) as sinks, state:
        events: Iterator[Event] = coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0), copies=copies)
        with contextlib.closing(events):  # type: ignore[type-var]
            for event in events:
                for recorder in (sinks, state, copies):
                    recorder.on_event(event)
                if isinstance(event, CheckpointSaved) and event.update == 8:
                    assert wait_until(lambda: 8 in fleet.held("b"))
                    break  # the coordinator is lost, with its disk
    files.remove_folder(Path(plan.run_dir))
    (run,) = fleet.disk("b").iterdir()
    ((_, copy),) = held_copies(run)
    copy.rename(plan.run_dir)
    assert verify_data.verify(Path(plan.run_dir)).is_proved
    resumed = plan_for(14, resume=plan.run_dir)
    assert resume.find_checkpoint(resumed).checkpoint.update == 8
    run_folder.check_may_write(resumed)
    assert weights_of(run_here(resumed)) == whole
    verdict = verify_data.verify(Path(plan.run_dir))
    assert verdict.is_proved
    assert any(line.startswith("proved: 14 updates") for line in verdict.lines)


class OtherDisk(InlineFleet):
    """Its instance has the run folder `there`, and sees no file of the coordinator."""

    def __init__(self, plan: Plan, there: Path) -> None:
        super().__init__(on_disk(plan, there))
        self.servers: List[DirectServer] = []
        self.fault: Fault = unchanged

    def call(self, method: str, *arguments: Any) -> List[Any]:
        sees_no_file = method == "has_file" or (method == "load_checkpoint" and len(arguments) == 3)
        return [False] if sees_no_file else super().call(method, *arguments)

    def serve(self, kind: Callable[..., Any], *arguments: Any) -> DirectServer:
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
        return super().call(method, *arguments) if self._there is None else InlineFleet.call(self, method, *arguments)

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            yield report
            if self._there is not None and report.first_update + 1 == self.lost_after:
                raise FleetBroken((InstanceLost(0, "head", "died", "its process died", "", "", "0.log"),), "")

    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        assert self._there is not None
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


def ended(events: List[Event]) -> Any:
    return only(events[-1:], RunEnded)


def test_the_checkpoints_are_on_the_disk_of_the_coordinator(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 14)
    checkpoints = checkpoints_folder(plan.run_dir)
    here = events_of(plan, InlineFleet(plan))
    checkpoints.rename(tmp_path / "expected")
    fleet = OtherDisk(plan, tmp_path / "there")
    events = events_of(plan, fleet)
    assert contents(checkpoints) == contents(tmp_path / "expected")  # with retention, and accuracies added later
    assert ended(events) == ended(here)
    saved = of(events, CheckpointSaved)
    assert saved == of(here, CheckpointSaved)
    assert not checkpoints_folder(tmp_path / "there").exists()
    assert len(fleet.servers) == 1


def test_an_instance_that_moves_to_another_disk_has_no_checkpoint_there(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 14)
    whole = ended(events_of(plan, InlineFleet(plan)))
    shutil.rmtree(str(checkpoints_folder(plan.run_dir)))
    fleet = MovesToOtherDisk(plan, tmp_path / "there")
    events = events_of(plan, fleet)
    (repaired,) = of(events, Repaired)
    assert (repaired.seeded_from.rpartition("/")[2], repaired.update) == ("update-00000008", 8)
    assert ended(events).weights_sha256 == whole.weights_sha256
    valid, damaged = newest_valid(checkpoints_folder(plan.run_dir))
    assert (valid and valid.update, damaged) == (14, [])
    assert not (tmp_path / "there" / "checkpoints").exists()
    assert [set(server.methods) for server in fleet.servers] == [{"read"}, {"begin", "write", "commit"}]


def test_a_run_resumes_from_the_disk_of_the_coordinator(make: Make, tmp_path: Path) -> None:
    whole = ended(events_of(plan_for(make, 14), InlineFleet(plan_for(make, 14))))
    shutil.rmtree(str(tmp_path / "run"))
    events_of(plan_for(make, 6), OtherDisk(plan_for(make, 6), tmp_path / "there"))
    resumed, _ = newest_valid(checkpoints_folder(tmp_path / "run"))
    plan = plan_for(make, 14)
    fleet = OtherDisk(plan, tmp_path / "another")
    events = events_of(plan, fleet, resumed=resumed)
    assert (updates_of(events), ended(events).weights_sha256) == (list(range(7, 15)), whole.weights_sha256)
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
    failed = of(events, CheckpointFailed)
    assert "differ from those that were sent" in failed[0].cause
    saved = [event.path for event in events[: events.index(failed[0])] if isinstance(event, CheckpointSaved)]
    assert (failed[0].previous, ended(events).updates) == (saved[-1], 40)


def test_a_first_checkpoint_that_cannot_be_sent_or_written_ends_the_run(make: Make, tmp_path: Path) -> None:
    plan = plan_for(make, 6)
    fleet = OtherDisk(plan, tmp_path / "there")
    fleet.fault = lambda number, request: None if request[0] == "write" else request
    with pytest.raises(CheckpointNotSaved, match="there is no earlier checkpoint"):
        events_of(plan, fleet)
    checkpoints = checkpoints_folder(plan.run_dir)
    assert newest_valid(checkpoints) == (None, [])
    files.remove_folder(checkpoints)
    checkpoints.touch()
    with pytest.raises(CheckpointNotSaved, match="cannot write the checkpoint .*update-00000004"):
        events_of(plan, InlineFleet(plan))
