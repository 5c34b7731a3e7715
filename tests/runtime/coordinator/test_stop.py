"""Why a run ends: signals by the phase of the run, preemptions and the next command, early stopping."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest

import raypod
from raypod import train
from raypod.__main__ import main
from raypod.errors import Preempted
from raypod.events import EvaluationDone, Repaired, RunEnded, StoppedEarly
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import Plan
from raypod.plan.sections import RunSection
from raypod.runs import run_folder, run_state
from raypod.runs.metrics import line_of
from raypod.runtime.coordinator import stop as stop_module
from raypod.runtime.coordinator.stop import Stop, deadline_of, early_stop, first_stop, stop_on_signal
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.system import signals
from raypod.system.files import strict_json
from tests.support import SUPPORT
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.scripted_runs import Breaks, broken, events_of, lost, only

GRACE = {"preemption_grace_s": 60.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock that `later` advances, so that no signal is a copy of the one before."""
    clock = SimpleNamespace(now_s=7.0)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def stop_with(**flags: Any) -> Stop:
    stop = Stop()
    stop.configure(RunSection(**flags))
    return stop


def send(stop: Stop, clock: Any, number: int) -> None:
    clock.now_s += 1.0
    stop.on_signal(number, None)


def state_of(stop: Stop) -> Tuple[bool, bool, bool]:
    return stop.requested, stop.is_preempted, stop.must_leave


@pytest.mark.parametrize(
    ("flags", "number", "expected"),
    [
        ({}, signal.SIGTERM, (True, False, False)),
        ({}, signal.SIGINT, (True, False, False)),
        ({}, signal.SIGUSR1, (True, True, False)),
        ({"preemption_exit_code": 85}, signal.SIGTERM, (True, True, False)),
        (GRACE, signal.SIGTERM, (True, True, True)),
        (GRACE, signal.SIGUSR1, (True, True, True)),
        (GRACE, signal.SIGINT, (True, False, False)),
        (GRACE, signal.SIGHUP, (True, False, False)),
    ],
)
def test_a_signal_during_training(clock: Any, flags: Any, number: int, expected: Any) -> None:
    stop = stop_with(**flags)
    with stop.deferred():
        send(stop, clock, number)
    assert state_of(stop) == expected
    assert stop.is_signalled


def test_a_notice_before_the_training_ends_the_run_with_the_chosen_code(clock: Any) -> None:
    stop = stop_with(preemption_exit_code=85)
    with pytest.raises(Preempted, match="^preempted: nothing had started") as raised:
        send(stop, clock, signal.SIGTERM)
    assert raised.value.exit_code == 85
    with pytest.raises(Preempted):
        stop.check()
    plain = stop_with()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        send(plain, clock, signal.SIGTERM)
    assert not isinstance(interrupted.value, Preempted)


def test_a_further_signal_shortens_no_grace_period_and_ctrl_c_or_no_grace_period_end_the_run(clock: Any) -> None:
    stop = stop_with(**GRACE)
    with stop.deferred():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            send(stop, clock, number)
        with pytest.raises(Preempted):
            send(stop, clock, signal.SIGINT)
    stop = stop_with(preemption_exit_code=85)
    with stop.deferred():
        send(stop, clock, signal.SIGTERM)
        with pytest.raises(Preempted):
            send(stop, clock, signal.SIGTERM)
    stop = stop_with(**GRACE)
    with stop.deferred():
        send(stop, clock, signal.SIGINT)
        send(stop, clock, signal.SIGTERM)
    assert state_of(stop) == (True, False, True)  # the user has stopped the run: it is not preempted


def test_a_notice_while_the_run_ends_lets_it_end_and_a_drained_host_can_be_a_preemption(clock: Any) -> None:
    for flags in (GRACE, {"preemption_exit_code": 85}):
        stop = stop_with(**flags)
        stop.begin_end()
        send(stop, clock, signal.SIGTERM)
        assert not stop.is_signalled
    with pytest.raises(KeyboardInterrupt):
        send(stop, clock, signal.SIGTERM)
    for flags, expected in (({}, False), (GRACE, True)):
        stop = stop_with(**flags)
        stop.request("Ray drains host a", is_drained=True)
        assert (stop.requested, stop.is_preempted, stop.cause) == (True, expected, "Ray drains host a")


def test_only_training_is_interrupted_shortly_before_the_deadline(clock: Any) -> None:
    stop = stop_with(**GRACE)
    with stop_on_signal(stop), stop.deferred():
        send(stop, clock, signal.SIGTERM)
        with stop.saving():
            stop.interrupt_late()
        with pytest.raises(Preempted, match="the 60 s of --preemption-grace-s end"):
            stop.interrupt_late()

    def replaced() -> None:
        try:
            send(stop, clock, signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as Ray does

    stop = stop_with(**GRACE)
    with pytest.raises(Preempted), stop_on_signal(stop):
        replaced()


def test_an_unknown_state_does_not_keep_the_process_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, exits = [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(stop_module, "abort", ended.append)
    monkeypatch.setattr(stop_module, "os", SimpleNamespace(_exit=exits.append))
    stop = stop_with(**GRACE, preemption_exit_code=85)

    def fail() -> str:
        raise OSError("no disk")

    stop.describe = fail
    stop.end_now()
    assert str(ended[0]).endswith("the state of the run is unknown (OSError: no disk)")
    assert ended[0].exit_code == 85
    assert wait_until(lambda: exits == [85])  # also if a disk hangs, so that `abort` does not return


def test_the_contexts_restore_handlers_and_wakeup_descriptor() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before, stop = [signal.getsignal(number) for number in numbers], stop_with(**GRACE)
    with deadline_of(stop), deadline_of(stop):
        assert stop.has_deadline
        descriptor = signal.set_wakeup_fd(-1)
        assert descriptor != -1
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    assert not stop.has_deadline
    assert (signal.set_wakeup_fd(-1), [signal.getsignal(number) for number in numbers]) == (-1, before)


def test_the_time_that_is_left_after_a_notice(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    stop = stop_with(**GRACE)
    assert stop.seconds_left() is None
    with stop.deferred():
        send(stop, clock, signal.SIGTERM)
        assert stop.seconds_left() == 60 - 5
        clock.now_s += 40
        send(stop, clock, signal.SIGTERM)  # repeated: it changes no deadline
        assert stop.seconds_left() == 60 - 5 - 41
    unlimited = stop_with()
    with unlimited.deferred():
        send(unlimited, clock, signal.SIGUSR1)
        assert unlimited.seconds_left() is None


ACCURACY = Metric("accuracy", "higher")


def evaluations(metric: Metric, *values: float) -> List[EvaluationDone]:
    return [EvaluationDone(1, {metric.name: value}, 10 * (i + 1), i + 1) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("metric", "values", "stop", "best"),
    [
        (LOSS, (3, 2, 1), None, None),
        (LOSS, (3, 2, 2, 2), 40, 20),
        (LOSS, (3, 4, 2, 3, 2.5, 1), 50, 30),
        (ACCURACY, (3, 2, 1), 30, 10),
        (LOSS, (math.nan, math.nan, math.nan), 30, 10),
        (LOSS, (math.nan, 3, math.nan, 4), 40, 20),
    ],
)
def test_no_improvement_ends_it(metric: Metric, values: List[float], stop: Optional[int], best: Optional[int]) -> None:
    done = evaluations(metric, *values)
    for order in (done, done[::-1]):
        found = first_stop(metric, 2, order)
        assert (found and found.update, found and found.best_update) == (stop, best)


@pytest.mark.parametrize("metric", [LOSS, ACCURACY])
def test_infinite_values_count_as_those_that_a_resumed_run_reads(metric: Metric, tmp_path: Path) -> None:
    done, path = evaluations(metric, math.inf, math.nan, -math.inf, 3, math.inf, 2, 4), tmp_path / "evaluations.jsonl"
    path.write_text("".join(f"{strict_json(line_of(each))}\n" for each in done))
    read = run_folder.measured(EvaluationDone, path)
    for patience in range(1, 7):
        found, expected = first_stop(metric, patience, done), first_stop(metric, patience, read)
        assert str(found) == str(expected)  # NaN is not equal to itself


def test_a_run_ends_early_with_a_checkpoint(make: Callable[..., Plan]) -> None:
    plan = make(training={"epochs": 9, "evaluate_every": 1, "early_stopping": "2 evaluations"})
    events = events_of(plan, ScriptedFleet(plan))
    stopped, ended = only(events[-2:-1], StoppedEarly), only(events[-1:], RunEnded)
    assert stopped.update == ended.updates == 3 * plan.updates_per_epoch
    assert (stopped.best_update, ended.interrupted) == (plan.updates_per_epoch, False)
    plan = make(training={"epochs": 9, "evaluate_every": 1, "early_stopping": "1 evaluation"})
    done = [EvaluationDone(1, {"loss": 1.0, "accuracy": 5.0}, update, 1) for update in (3, plan.updates_per_epoch)]
    assert early_stop(plan, done) is None  # the evaluation at the end of an earlier part does not count


def train_tiny(folder: Path, *flags: str) -> int:
    inline = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--batch-size", "64"]
    return train.main([*inline, "--run-dir", str(folder), "--learning-rate", "1e-9", *flags])


def test_a_resumed_run_stops_at_the_same_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--evaluate-every", "1", "--lr-schedule", "constant"]
    flags += ["--early-stopping", "2 evaluations", "--early-stopping-metric", "accuracy", "--best-metric", "loss"]
    assert train_tiny(tmp_path / "whole", *flags, "--updates", "45") == 0
    whole = summary(tmp_path / "whole")
    assert whole["updates"] == whole["stopped_early"]["update"] == 15  # 3 epochs: the accuracy does not change
    assert not whole["interrupted"]
    out = capsys.readouterr().out
    assert "Stopped early after update 15: accuracy has not improved for 2 evaluations; the best is " in out
    assert whole["stopped_early"]["reason"] in out
    shown = f"stopped early, as {whole['stopped_early']['reason']}"
    assert main(["status", str(tmp_path / "whole")]) == 0
    assert f" state  done after update 15: {shown}\n" in capsys.readouterr().out
    assert main(["monitor", "--json", str(tmp_path / "whole")]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["message"] == shown

    assert train_tiny(tmp_path / "part", *flags, "--updates", "8") == 0
    assert train_tiny(tmp_path / "rest", *flags, "--updates", "45", "--resume", str(tmp_path / "part")) == 0
    rest = summary(tmp_path / "rest")
    assert (rest["weights_sha256"], rest["stopped_early"]) == (whole["weights_sha256"], whole["stopped_early"])
    assert [each["update"] for each in rest["evaluations"]] == [5, 8, 10, 15]

    capsys.readouterr()
    assert train_tiny(tmp_path / "whole", "--resume", str(tmp_path / "whole")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the run has stopped early after update 15: accuracy has not improved for 2 evaluations" in line
    assert train_tiny(tmp_path / "whole", "--resume", str(tmp_path / "whole"), "--early-stopping", "3 evaluations") == 0
    assert summary(tmp_path / "whole")["updates"] == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--early-stopping", "2 epochs"], "write a number of evaluations: 5 evaluations"),
        (["--early-stopping", "0 evaluations"], "must be at least 1 evaluation"),
        (["--early-stopping", "2 evaluations"], "needs evaluations during the run: add --evaluate-every 1"),
        (["--early-stopping-metric", "loss"], "--early-stopping-metric has no effect without --early-stopping"),
        (["--best-metric", "perplexity"], "--best-metric perplexity: the task measures loss, accuracy"),
        (["--preemption-exit-code=0"], "preemption_exit_code"),
        (["--preemption-exit-code=256"], "preemption_exit_code"),
        (["--preemption-grace-s=0"], "preemption_grace_s"),
    ],
)
def test_a_wrong_setting(flags: List[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_tiny(tmp_path / "run", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line or message in line.replace("-", "_")
    assert not (tmp_path / "run").exists()


CODE = 85
NOTICE = ["--preemption-grace-s", "3600", "--preemption-exit-code", str(CODE)]  # a grace period that nothing reaches
FLAGS = ["--device", "emulated", "--dataset", "preemptible:data", "--model", "preemptible:model", "--no-augment"]


FLAGS += ["--lr-schedule", "constant", "--checkpoint-every", "5 updates", "--fleet", "inline"]


FLAGS += ["--replicas", "2", "--batch-size", "16", "--num-instances", "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the user's module."""
    shutil.copy(SUPPORT / "preemptible.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def command(*flags: str) -> int:
    return train.main([*FLAGS, "--run-dir", "run", *NOTICE, *flags])


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", "run", *NOTICE, *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def state() -> run_state.RunState:
    found = run_state.read(Path("run"))
    assert found is not None
    return found


def summary(run: Any = "run") -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    return found


def checkpoints() -> List[str]:
    return sorted(path.name for path in Path("run", "checkpoints").iterdir() if re.fullmatch(r"update-\d+", path.name))


def last_event() -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads(Path("run", "events.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("place", "number"),
    [("call", signal.SIGTERM), ("call", signal.SIGUSR1), ("data", signal.SIGTERM), ("evaluation", signal.SIGTERM)],
)
def test_a_preempted_run_continues(folder: Path, place: str, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--updates", "22", "--evaluate-every", "1"]
    Path(f"at-{place}").write_text(str(int(number)))
    assert command(*flags) == CODE
    update = state().update
    assert (state().state, state().exit_code, state().message) == (run_state.PREEMPTED, CODE, "")
    assert (summary()["interrupted"], summary()["preempted"], summary()["evaluations"]) == (True, True, [])
    assert checkpoints()[-1] == f"update-{update:08d}"
    assert 5 <= update < 20 or (place, update) == ("evaluation", 20)
    assert f"Preempted after update {update}; continue with --resume" in capsys.readouterr().out
    assert (last_event()["event"], last_event()["preempted"]) == ("run_ended", True)
    assert not Path("waited").exists()
    assert command(*flags) == 0
    out, err = capsys.readouterr()
    assert f"from update {update} on" in out + err
    assert (state().state, summary()["preempted"]) == (run_state.DONE, False)
    assert [each["update"] for each in summary()["evaluations"]] == [20, 22]
    assert train.main([*FLAGS, *flags, "--run-dir", "whole"]) == 0
    assert summary()["weights_sha256"] == summary("whole")["weights_sha256"]
    assert main(["verify-data", "run"]) == 0


def test_a_notice_during_the_start_and_in_a_script(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("at-start").write_text(str(int(signal.SIGTERM)))
    assert command("--updates", "22") == CODE
    assert "raypod: preempted: nothing had started; repeat the command" in capsys.readouterr().err
    assert not Path("run").exists()
    Path("at-call").write_text(str(int(signal.SIGTERM)))
    ours = {
        "dataset": "preemptible:data",
        "model": "preemptible:model",
        "augment": False,
        "checkpoint_every": "5 updates",
    }
    run = {"device": "emulated", "fleet": "inline", "num_instances": 1, "updates": 40, "run_dir": "run"}
    with pytest.raises(raypod.Interrupted) as interrupted:
        raypod.fit(**ours, **run, preemption_grace_s=3600, progress=False)
    assert interrupted.value.result.summary["preempted"]
    assert state().state == run_state.PREEMPTED


class NoticedInARepair(Breaks):
    def repair(self, lost: Tuple[int, ...], may_share_hosts: bool) -> Dict[int, int]:
        signal.raise_signal(signal.SIGUSR1)
        return super().repair(lost, may_share_hosts)


def test_a_repair_is_completed_first(make: Callable[..., Plan]) -> None:
    plan, stop = make(training={"updates": 9}, pod={"num_instances": 2}), Stop()
    stop.grace_s = 3600.0
    events = events_of(plan, NoticedInARepair(plan, {(2, 1): broken(lost(1))}, repairs=[{0: 2}]), stop=stop)
    assert only(events, Repaired).update == 2
    ended = only(events, RunEnded)
    assert (ended.preempted, ended.updates, ended.checkpoint) == (True, 2, "update-2")


@pytest.mark.parametrize(
    ("place", "where"), [("blocked-call", "(instance 0: in call "), ("disk", "is in no checkpoint")]
)
def test_a_process_that_cannot_save_ends_in_time(processes: None, folder: Path, place: str, where: str) -> None:
    """The checkpoint before is the newest one, and one line says so."""
    Path(f"at-{place}").write_text(str(int(signal.SIGTERM)))
    done = start("--updates", "40", "--preemption-grace-s", "6")
    assert done.returncode == CODE, done.stderr
    newest = Path("run", "checkpoints", "LATEST").read_text().strip()
    assert (state().state, state().exit_code) == (run_state.PREEMPTED, CODE)
    assert [text for text in done.stderr.splitlines() if text.startswith("raypod: ")] == [f"raypod: {state().message}"]
    assert state().message.startswith("preempted: the 6 s of --preemption-grace-s end; ")
    assert where in state().message
    assert state().message.endswith(f"the same command continues from {newest}")
    assert (last_event()["event"], checkpoints()[-1]) == ("process_preempted", newest)
    assert command("--updates", "12") == 0


def test_a_detached_run(processes: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("steady").touch()
    assert start("--updates", "4000", "--detach").returncode == 0
    Path("at-call").write_text(str(int(signal.SIGTERM)))  # now: a run that ends early gives the command its exit code
    assert (main(["attach", "run"]), main(["status", "run"])) == (CODE, 0)
    assert "preempted after update" in capsys.readouterr().out
    assert start("--updates", "4000", "--detach").returncode == 0
    assert main(["stop", "run"]) == 0  # a user stops it: that is no preemption
    assert (state().state, state().exit_code) == (run_state.INTERRUPTED, 130)
