"""Preemptions: a signal in each phase of a run, and the next command. `preemptible` sends the signals."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

import raypod
from raypod import train
from raypod.__main__ import main
from raypod.events import Repaired, RunEnded
from raypod.plan.plan import Plan
from raypod.runs import run_state
from raypod.runtime.coordinator.stop import Stop
from tests.support import SUPPORT
from tests.support.bounded import COMMAND_S
from tests.support.scripted_runs import Breaks, broken, events_of, lost, only

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
    """Run the command in a process of its own."""
    line = [sys.executable, "-m", "raypod.train", *FLAGS, "--run-dir", "run", *NOTICE, *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def state() -> run_state.RunState:
    found = run_state.read(Path("run"))
    assert found is not None
    return found


def summary(run: str = "run") -> Dict[str, Any]:
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
def test_the_same_command_continues_a_preempted_run(
    folder: Path, place: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_notice_during_the_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("at-start").write_text(str(int(signal.SIGTERM)))
    assert command("--updates", "22") == CODE
    assert "raypod: preempted: nothing had started; repeat the command" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_script_that_trains(folder: Path) -> None:
    Path("at-call").write_text(str(int(signal.SIGTERM)))
    with pytest.raises(raypod.Interrupted) as interrupted:
        raypod.fit(
            dataset="preemptible:data",
            model="preemptible:model",
            augment=False,
            device="emulated",
            fleet="inline",
            num_instances=1,
            updates=40,
            checkpoint_every="5 updates",
            run_dir="run",
            preemption_grace_s=3600,
            progress=False,
        )
    assert interrupted.value.result.summary["preempted"]
    assert state().state == run_state.PREEMPTED


class NoticedInARepair(Breaks):
    """The notice of a preemption arrives during the repair."""

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
def test_a_process_that_cannot_save_ends_before_its_grace_period(
    processes: None, folder: Path, place: str, where: str
) -> None:
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
    assert last_event()["event"] == "process_preempted"
    assert checkpoints()[-1] == newest
    assert command("--updates", "12") == 0


def test_a_detached_run(processes: None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("steady").touch()
    assert start("--updates", "4000", "--detach").returncode == 0
    Path("at-call").write_text(str(int(signal.SIGTERM)))  # now: a run that ends early gives the command its exit code
    assert main(["attach", "run"]) == CODE
    assert main(["status", "run"]) == 0
    assert "preempted after update" in capsys.readouterr().out
    assert start("--updates", "4000", "--detach").returncode == 0
    assert main(["stop", "run"]) == 0  # a user stops it: that is no preemption
    assert (state().state, state().exit_code) == (run_state.INTERRUPTED, 130)


@pytest.mark.parametrize("flag", ["--preemption-exit-code=0", "--preemption-exit-code=256", "--preemption-grace-s=0"])
def test_wrong_values_are_one_line(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--fleet", "inline", "--run-dir", str(tmp_path / "run"), flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag.partition("=")[0][2:].replace("-", "_") in line.replace("-", "_")
    assert not (tmp_path / "run").exists()
