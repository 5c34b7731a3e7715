"""Trackers: what they get, resumes without duplicates, and trackers that fail, hang or are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Optional

import psutil
import pytest

from raypod import train
from raypod.api.fit import plan_of
from raypod.events import EvaluationDone, PhaseBegun, RunEnded, RunStarted, UpdateDone
from raypod.observe.trackers import companions, process
from raypod.observe.trackers.companions import TrackerProcesses
from raypod.observe.trackers.follower import Follower
from raypod.observe.trackers.tracker import Point, RunFacts, Steps
from raypod.runs import run_folder
from raypod.runs.metrics import line_of
from raypod.system.companion import Input, read_state, write_state
from raypod.system.redaction import Redaction
from tests.support import ROOT
from tests.support.bounded import wait_until
from tests.support.companions import FakeProcesses

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--lr-schedule", "constant"]
FAKE = "tests.support.fake_tracker:Fake"


def update(number: int) -> str:
    return json.dumps(line_of(UpdateDone(number, 1, {"loss": 1 / number}, number, 10.0, float(number)))) + "\n"


def evaluation(number: int) -> str:
    return json.dumps(line_of(EvaluationDone(5, {"accuracy": 50.0}, number, 1))) + "\n"


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(lines))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the fake tracker, which processes of trackers can import."""
    monkeypatch.setenv("FAKE_TRACKER", str(tmp_path / "fake.jsonl"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path / "fake.jsonl"


def lines_of(path: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path: Path, name: str) -> List[int]:
    return [line["step"] for line in lines_of(path) if name in line.get("values", {})]


def test_points_come_once_in_the_order_of_their_steps(tmp_path: Path) -> None:
    metrics, tests = tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"
    follower = Follower(tmp_path, 1000.0, Steps(1, -1))
    append(metrics, update(1), update(2), update(3))
    append(tests, evaluation(2), evaluation(4))  # the line of update 4 is not there yet
    points = follower.poll()
    training, test = ["training/loss", "training/samples_per_s"], ["test/accuracy"]
    assert [(point.step, sorted(point.values)) for point in points] == [(2, training), (2, test), (3, training)]
    assert points[0].unix_s == 1002.0
    assert follower.poll() == []
    metrics.unlink()  # the run is resumed from update 1
    append(metrics, update(1), update(2), update(3), update(4))
    assert [(point.step, len(point.values)) for point in follower.poll()] == [(4, 2), (4, 1)]
    append(tests, evaluation(9))
    assert follower.poll() == []
    assert [point.step for point in follower.poll(is_last=True)] == [9]
    assert follower.abandoned == []
    other = tmp_path / "other"  # an elastic run has gone back to update 2, with other replicas
    append(other, update(1), update(2), update(3).replace('"loss": 0.3', '"loss": 0.4'), update(4), update(5))
    other.rename(metrics)
    assert [point.step for point in follower.poll()] == [5]
    assert follower.abandoned == [3]
    later = Follower(tmp_path, 1000.0, Steps(5, 9))  # the tracker has failed, and is opened again
    later.take_notes_of(follower)
    append(metrics, update(4).replace("0.25", "0.5"))
    assert later.poll() == []
    assert later.abandoned == [3, 4]


def test_an_update_whose_reports_are_missing_has_no_metrics(tmp_path: Path) -> None:
    lost = UpdateDone(1, 1, {"loss": float("nan")}, 1, 10.0, 1.0, 0.0, (1,))
    append(tmp_path / "metrics.jsonl", json.dumps(line_of(lost)) + "\n", '{"update": 2}\n')
    (point,) = Follower(tmp_path, 0.0, Steps(-1, -1)).poll()
    assert point.values == {"training/samples_per_s": 10.0}


class Ended(Input):
    """A run that ended, as seen by the process of a tracker."""

    def __init__(self) -> None:
        self.has_ended, self.lines = True, ["finished"]

    def take(self) -> List[str]:
        lines, self.lines = self.lines, []
        return lines

    def wait(self, timeout_s: float) -> None: ...


class Unreliable:
    """Fails in every method once, and in `log` after it has recorded half of the points."""

    def __init__(self, log: List[Any], failed: List[str]) -> None:
        self.calls, self.failed = log, failed

    def fail_once(self, method: str) -> None:
        if method not in self.failed:
            self.failed.append(method)
            raise OSError(method)

    def open(self, facts: RunFacts, run_id: Optional[str]) -> str:
        self.fail_once("open")
        return run_id or "id"

    def recorded(self) -> Optional[Steps]:
        self.fail_once("recorded")
        return Steps(max([point.step for point in self.calls], default=-1), -1)

    def log(self, points: List[Point]) -> None:
        half = points if "log" in self.failed else points[:2]
        self.calls += half
        self.fail_once("log")

    def add_artifact(self, path: Path, name: str) -> None:
        self.fail_once("add_artifact")

    def close(self, end: str, facts: Dict[str, str]) -> None:
        self.fail_once("close")
        assert (end, facts["state"]) == ("finished", "done")


def test_a_tracker_that_fails_everywhere_gets_every_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_RETRY_S", (0.01,))
    append(tmp_path / "metrics.jsonl", *(update(number) for number in range(1, 6)))
    state = {"pid": 1, "started_ticks": 1, "host": "", "state": "done", "update": 5, "total_updates": 5}
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "config.yaml").write_text("training:\n  epochs: 3\n  freeze: null\n")
    calls: List[Any] = []
    failed: List[str] = []
    path = companions.path_of(tmp_path, "own")
    path.parent.mkdir()
    process.Session(lambda: Unreliable(calls, failed), tmp_path, 0.0, path).follow(Ended(), "report")
    assert failed == ["open", "recorded", "log", "add_artifact", "close"]
    assert [point.step for point in calls] == [1, 2, 3, 4, 5]
    assert read_state(path, companions.TrackerRecord()) == companions.TrackerRecord("id", 5, -1, "", True)
    assert process.parameters_of(tmp_path) == {"training.epochs": "3"}


@pytest.mark.parametrize("code", [None, 0, 1])
def test_the_end_of_the_process_of_an_earlier_start_hides_nothing(make: Any, monkeypatch: Any, code: Any) -> None:
    plan, warnings = make(run={"trackers": FAKE, "tracker_timeout_s": 0.001}), []  # type: ignore[var-annotated]
    fakes, was_complete = FakeProcesses(monkeypatch), []  # type: FakeProcesses, List[bool]
    path = companions.path_of(Path(plan.run_dir), FAKE)

    def seen() -> Any:
        was_complete.append(read_state(path, companions.TrackerRecord()).is_complete)
        raise SystemExit

    with TrackerProcesses(plan, warnings.append, print, 0.0) as running:
        running.on_event(RunStarted("emulated", "", 0, 1, ()))
        write_state(path, companions.TrackerRecord("id", 5, -1, "", True))
        if code is None:  # the new one has waited for it, and cannot reach its server
            with pytest.raises(SystemExit):
                process.Session(seen, Path(plan.run_dir), 0.0, path).follow(Ended(), "none")
            assert was_complete == [False]
        (fake,) = fakes.started
        fake.hangs, fake.code = code != 0, code or None
    assert len(warnings) == (0 if code == 0 else 1)


def test_a_run_and_its_resumption_are_one_run(fake: Path, tmp_path: Path, capsys: Any, processes: None) -> None:
    run = str(tmp_path / "run")
    flags = [*FLAGS, "--tracker", FAKE, "--checkpoint-every", "3 updates", "--tracker-artifacts", "all"]
    assert train.main([*flags, "--updates", "6", "--run-dir", run]) == 0
    assert train.main(["--resume", f"{run}/checkpoints/update-00000003", "--updates", "8", "--run-dir", run]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if f"tracker {FAKE}" in line]
    assert all(line.startswith("waiting until ") for line in lines), lines
    assert [line["opened"] for line in lines_of(fake) if "opened" in line] == [None, "first"]
    assert steps_of(fake, "training/loss") == list(range(1, 9))
    assert steps_of(fake, "test/accuracy") == [6, 8]
    artifacts = [line["artifact"] for line in lines_of(fake) if "artifact" in line]
    assert artifacts == 2 * ["report.html", "summary.json", "config.yaml", "plan.json", "checkpoint"]
    assert all(line["exists"] for line in lines_of(fake) if "artifact" in line)
    closed = [line for line in lines_of(fake) if "closed" in line]
    assert [line["closed"] for line in closed] == ["finished", "finished"]
    sha256 = json.loads((Path(run) / "summary.json").read_text())["weights_sha256"]
    assert closed[1]["facts"] == {"state": "done", "update": "8", "restarts": "0", "weights_sha256": sha256}
    assert lines_of(fake)[0]["parameters"]["training.model"] == "tiny"


def test_a_hanging_tracker_is_ended(fake: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, processes: None) -> None:
    """Leaving the context kills a tracker that would need longer; `leaves_nothing_behind` checks it."""
    monkeypatch.setenv("FAKE_TRACKER_HANGS", "1")
    flags = [*FLAGS, "--updates", "2", "--tracker", FAKE, "--tracker-timeout-s", "0.1"]
    assert train.main([*flags, "--run-dir", str(tmp_path / "run")]) == 0
    output = capsys.readouterr()
    (line,) = [each for each in (output.out + output.err).splitlines() if f"tracker {FAKE}" in each]
    assert "has not recorded the whole run within 0.1 s" in line


def test_failures_and_the_death_of_the_coordinator(fake: Path, make: Any, monkeypatch: Any, processes: None) -> None:
    away = fake.with_name("away")
    away.touch()
    monkeypatch.setenv("FAKE_TRACKER_AWAY", str(away))
    monkeypatch.setenv("FAKE_API_KEY", "the-secret-key")
    plan = make(run={"trackers": f"{FAKE},tensorboard", "tracker_timeout_s": 60.0})
    run_folder.create(plan)
    run_dir, warnings = Path(plan.run_dir), []  # type: ignore[var-annotated]
    append(run_dir / "metrics.jsonl", update(1))
    with TrackerProcesses(plan, warnings.append, print, 0.0) as running:
        running.on_event(RunStarted("emulated", "", 0, 1, ()))
        (child,) = [each.process for each in running._processes]
        assert child is not None
        assert wait_until(lambda: bool(read_state(companions.path_of(run_dir, FAKE), companions.TrackerRecord()).error))
        running._processes[0]._looked_s = 0.0
        running.on_event(PhaseBegun("training", 1))
        away.unlink()
        append(run_dir / "metrics.jsonl", update(2))
        child.stdin.close()  # as the operating system does when the coordinator is killed
        assert wait_until(lambda: child.poll() is not None)
    (warning,) = warnings
    assert "the server is away from ***" in warning
    assert lines_of(fake)[-1]["closed"] == "killed"
    assert steps_of(fake, "training/loss") == [1, 2]
    contents = [file.read_bytes() for file in run_dir.rglob("*") if file.is_file()]
    assert any(b"the server is away from ***" in content for content in contents)
    assert not any(b"the-secret-key" in content for content in contents)


def test_a_tracker_whose_process_is_killed_is_started_again(fake: Path, make: Any, processes: None) -> None:
    plan, warnings = make(run={"trackers": FAKE, "tracker_timeout_s": 60.0}), []  # type: ignore[var-annotated]
    run_folder.create(plan)
    run_dir = Path(plan.run_dir)
    append(run_dir / "metrics.jsonl", update(1))
    path = companions.path_of(run_dir, FAKE)

    def has_recorded(number: int) -> bool:
        running.on_event(PhaseBegun("training", 1))
        return read_state(path, companions.TrackerRecord()).training == number

    with TrackerProcesses(plan, warnings.append, print, 0.0) as running:
        running.on_event(RunStarted("emulated", "", 0, 1, ()))
        assert wait_until(lambda: has_recorded(1))
        module = "raypod.observe.trackers.process"
        (child,) = [each for each in psutil.Process().children() if module in each.cmdline()]
        child.kill()
        append(run_dir / "metrics.jsonl", update(2))
        assert wait_until(lambda: has_recorded(2))
        running.on_event(RunEnded(2, False, "", None))
    assert (warnings, steps_of(fake, "training/loss")) == ([], [1, 2])
    assert [line["opened"] for line in lines_of(fake) if "opened" in line] == [None, "first"]
    assert lines_of(fake)[-1]["closed"] == "finished"


def test_secrets_of_the_environment_are_not_in_messages() -> None:
    environment = {"A_KEY": "abcdef123", "URI": "http://me:p%40ssword@host/x", "B_TOKEN": "1", "HOME": "/root"}
    redaction = Redaction(environment)
    text = redaction.clean("abcdef123 failed at http://me:p%40ssword@host/x with p@ssword, 1 of 2; http://a:b@c/root")
    assert text == "*** failed at http://***@host/x with ***, 1 of 2; http://***@c/root"


def test_trackers_of_a_function_call() -> None:
    plan = plan_of(None, None, None, {"tracker": ["mlflow", "tensorboard"]}, is_dry=True)
    assert plan.config.run.trackers == ("mlflow", "tensorboard")
    assert plan.config.run.writes_tensorboard
    assert not plan_of(None, None, None, {"tracker": "wandb"}, is_dry=True).config.run.writes_tensorboard
