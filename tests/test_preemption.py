"""Preemptions of real processes: a signal in each phase of a run, the end within the grace period, the next command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import psutil
import pytest
from bounded import COMMAND_S, wait_until

from raypod.__main__ import main
from raypod.record import run_state

CODE, GRACE_S = 85, 60.0  # a grace period that only a failure reaches
SHORT_S = 6.0
FLAGS = ["--device", "emulated", "--dataset", "preemptible:data", "--model", "preemptible:model", "--no-augment"]
SCHEDULE = ["--lr-schedule", "constant", "--checkpoint-every", "5 updates", "--epochs", "9"]
INLINE = ["--fleet", "inline", "--num-instances", "1"]


class Command:
    """A training in a working directory in which files make it slow. See `preemptible`."""

    def __init__(self, folder: Path, *flags: str, grace_s: float = GRACE_S, within: Sequence[str] = ()) -> None:
        """`within` is the command line before that of the training."""
        self.folder, self.run = folder, folder / "run"
        notice = ["--preemption-grace-s", str(grace_s), "--preemption-exit-code", str(CODE)]
        line = [sys.executable, "-m", "raypod.train", *FLAGS, *SCHEDULE, "--run-dir", "run", *notice, *flags]
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._err = (folder / "err").open("a+")
        self.process = subprocess.Popen(
            [*within, *line],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=self._err,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def reach(self, is_there: Callable[[], bool]) -> None:
        assert wait_until(lambda: is_there() or self.process.poll() is not None, COMMAND_S)
        assert self.process.poll() is None, self.output

    def reach_update(self, update: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.reach(lambda: metrics.is_file() and metrics.read_text().count("\n") >= update)

    def make_slow(self, what: str) -> None:
        """Return once the training is where it is slow."""
        (self.folder / what).touch()
        self.reach((self.folder / f"in-{what}").exists)
        (self.folder / what).unlink()  # the next command is not slow

    def end_by(self, *numbers: int) -> Tuple[int, float]:
        """Send the signals; return the exit code, and the time until the end in seconds."""
        began_s = time.monotonic()
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(0.4)  # an earlier signal is a copy of the one before
        return self.process.wait(COMMAND_S), time.monotonic() - began_s

    def close(self) -> None:
        if self.process.poll() is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                each.kill()
            self.process.kill()
            self.process.wait()
        self._err.close()

    @property
    def output(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def state(self) -> run_state.RunState:
        found = run_state.read(self.run)
        assert found is not None
        return found

    @property
    def summary(self) -> Dict[str, Any]:
        found: Dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return found

    @property
    def checkpoints(self) -> List[str]:
        return sorted(path.name for path in (self.run / "checkpoints").iterdir())

    @property
    def last_event(self) -> Dict[str, Any]:
        found: Dict[str, Any] = json.loads((self.run / "events.jsonl").read_text().splitlines()[-1])
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`start(*flags)`: start a training, whose calls take a while."""
    started: List[Command] = []
    shutil.copy(Path(__file__).parent / "preemptible.py", tmp_path)
    (tmp_path / "steady").touch()

    def make(*flags: str, **options: Any) -> Command:
        started.append(Command(tmp_path, *flags, **options))
        return started[-1]

    yield make
    for each in started:
        each.close()


def assert_saved(command: Command) -> int:
    """Assert that a preempted run has a checkpoint of its last update, and returns that update."""
    state, summary = command.state, command.summary
    assert (state.state, state.exit_code, state.message) == (run_state.PREEMPTED, CODE, "")
    assert (summary["interrupted"], summary["preempted"]) == (True, True)
    assert command.checkpoints[-1] == f"update-{state.update:08d}"
    assert f"Preempted after update {state.update}; continue with --resume" in command.output
    assert (command.last_event["event"], command.last_event["preempted"]) == ("run_ended", True)
    return state.update


def assert_unsaved(command: Command, where: str) -> None:
    """Assert that a run ended without another checkpoint, and says so in one line."""
    state, newest = command.state, (command.run / "checkpoints" / "LATEST").read_text().strip()
    assert (state.state, state.exit_code) == (run_state.PREEMPTED, CODE)
    lines = [line for line in command.output.splitlines() if line.startswith("raypod: ")]
    assert lines == [f"raypod: {state.message}"]
    assert state.message.startswith(f"preempted: the {SHORT_S:g} s of --preemption-grace-s end; ")
    assert where in state.message
    assert state.message.endswith(f"the same command continues from {newest}")
    assert command.last_event["event"] == "process_preempted"
    complete = [name for name in command.checkpoints if re.fullmatch(r"update-\d+", name)]
    assert complete[-1] == newest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_same_command_continues_a_preempted_run(
    start: Callable[..., Command], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = start(*INLINE, "--updates", "30")
    command.reach_update(7)
    assert command.end_by(number, signal.SIGTERM)[0] == CODE  # the second one changes nothing
    update = assert_saved(command)
    (tmp_path / "steady").unlink()
    again = start(*INLINE, "--updates", "30")
    assert again.process.wait(COMMAND_S) == 0, again.output
    assert f"from update {update} on" in again.output
    assert (again.state.state, again.summary["preempted"]) == (run_state.DONE, False)
    whole = start(*INLINE, "--updates", "30", "--run-dir", "whole")
    assert whole.process.wait(COMMAND_S) == 0, whole.output
    reference = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert again.summary["weights_sha256"] == reference["weights_sha256"]
    assert main(["verify-data", str(again.run)]) == 0
    capsys.readouterr()


def test_a_notice_during_the_start(start: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "slow-start").touch()
    command = start(*INLINE)
    command.reach((tmp_path / "in-slow-start").exists)
    assert command.end_by(signal.SIGTERM)[0] == CODE
    assert "raypod: preempted: nothing had started; repeat the command" in command.output
    assert not command.run.exists()


@pytest.mark.parametrize("what", ["slow-call", "blocked-call"])
def test_a_call_that_is_longer_than_the_grace_period(start: Callable[..., Command], what: str) -> None:
    """`blocked-call` runs no Python code: no signal handler of Python is executed."""
    command = start(*INLINE, grace_s=SHORT_S)
    command.reach_update(6)
    command.make_slow(what)
    code, took_s = command.end_by(signal.SIGTERM)
    assert (code, took_s < SHORT_S) == (CODE, True)
    assert_unsaved(command, "(instance 0: in call ")
    again = start(*INLINE, "--updates", "12")
    assert again.process.wait(COMMAND_S) == 0, again.output


def test_a_checkpoint_that_is_not_written_in_time_leaves_the_one_before(start: Callable[..., Command]) -> None:
    command = start(*INLINE, grace_s=SHORT_S)
    command.reach_update(6)
    command.make_slow("slow-disk")
    code, took_s = command.end_by(signal.SIGUSR1)
    assert (code, took_s < SHORT_S) == (CODE, True)
    assert_unsaved(command, "is in no checkpoint")


def test_the_wait_for_data_is_abandoned(start: Callable[..., Command]) -> None:
    command = start(*INLINE)
    command.reach_update(6)
    command.make_slow("slow-data")
    code, took_s = command.end_by(signal.SIGTERM)
    assert (code, took_s < GRACE_S / 2) == (CODE, True)
    assert_saved(command)


def test_an_evaluation_is_abandoned_and_made_by_the_next_process(start: Callable[..., Command], tmp_path: Path) -> None:
    flags = [*INLINE, "--evaluate-every", "1", "--updates", "22"]
    command = start(*flags)
    command.make_slow("slow-evaluation")
    assert command.end_by(signal.SIGTERM)[0] == CODE
    update = assert_saved(command)
    assert update == 20
    assert command.summary["evaluations"] == []
    again = start(*flags)
    assert again.process.wait(COMMAND_S) == 0, again.output
    assert [each["update"] for each in again.summary["evaluations"]] == [20, 22]


def test_the_first_process_of_a_container(start: Callable[..., Command]) -> None:
    """The kernel ignores signals to PID 1 that have no handler, and PID 1 gets orphans as children."""
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False, timeout=60).returncode:
        pytest.skip("PID namespaces are not permitted here")
    command = start(within=namespace)
    command.reach_update(6)
    (first,) = psutil.Process(command.process.pid).children()
    processes = first.children(recursive=True)
    first.send_signal(signal.SIGTERM)
    assert command.process.wait(COMMAND_S) == CODE, command.output
    assert_saved(command)
    assert command.state.pid == 1
    assert not psutil.wait_procs(processes, timeout=COMMAND_S)[1]


def test_under_ray_a_signal_to_the_process_group(start: Callable[..., Command]) -> None:
    command = start()
    command.reach_update(6)
    processes = psutil.Process(command.process.pid).children(recursive=True)
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.process.wait(COMMAND_S) == CODE, command.output
    assert_saved(command)
    assert not psutil.wait_procs(processes, timeout=COMMAND_S)[1]


@pytest.mark.parametrize(("what", "flags"), [("slow-call", []), ("slow-data", ["--num-workers", "1"])])
def test_under_ray_a_call_that_is_too_long_and_data_that_comes_too_late(
    start: Callable[..., Command], what: str, flags: List[str]
) -> None:
    grace_s = SHORT_S if what == "slow-call" else GRACE_S
    command = start(*flags, grace_s=grace_s)
    command.reach_update(6)
    processes = psutil.Process(command.process.pid).children(recursive=True)
    command.make_slow(what)
    code, took_s = command.end_by(signal.SIGTERM)
    assert (code, took_s < grace_s) == (CODE, True)
    if flags:
        assert_saved(command)
    else:
        assert_unsaved(command, ": in call ")
    assert not psutil.wait_procs(processes, timeout=COMMAND_S)[1]


def test_under_ray_a_repair_is_completed_first(start: Callable[..., Command]) -> None:
    command = start("--checkpoint-every", "1000 updates")
    command.reach_update(6)
    log = (command.run / "logs" / "instance-1.log").read_text()
    os.kill(int(log.rpartition(", pid ")[2].partition(":")[0]), signal.SIGKILL)
    command.reach(lambda: '"repairing"' in (command.run / "events.jsonl").read_text())
    assert command.end_by(signal.SIGTERM)[0] == CODE
    assert_saved(command)
    assert command.summary["restarts"] == 1


SCRIPT = """
import raypod

try:
    raypod.fit(dataset="preemptible:data", model="preemptible:model", augment=False, device="emulated", fleet="inline",
               num_instances=1, epochs=9, run_dir="run", preemption_grace_s=60, progress=False)
except raypod.Interrupted as interrupted:
    print("preempted:", interrupted.result.summary["preempted"])
"""


def test_a_script_that_trains(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "preemptible.py", tmp_path)
    (tmp_path / "steady").touch()
    run = tmp_path / "run"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    line = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(line, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as script:
        metrics = run / "metrics.jsonl"
        assert wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, COMMAND_S)
        script.send_signal(signal.SIGTERM)
        out, _ = script.communicate(timeout=COMMAND_S)
    assert (script.returncode, out) == (0, "preempted: True\n")
    state = run_state.read(run)
    assert state is not None
    assert state.state == run_state.PREEMPTED


def test_a_detached_run(start: Callable[..., Command], capsys: pytest.CaptureFixture[str]) -> None:
    command = start(*INLINE, "--detach")
    assert command.process.wait(COMMAND_S) == 0, command.output
    try:
        pid = command.state.pid
        os.kill(pid, signal.SIGTERM)
        assert wait_until(lambda: command.state.has_ended, COMMAND_S)
        assert main(["attach", str(command.run)]) == CODE
        assert main(["status", str(command.run)]) == 0
        assert "preempted after update" in capsys.readouterr().out
        again = start(*INLINE, "--detach")
        assert again.process.wait(COMMAND_S) == 0, again.output
        assert main(["stop", str(command.run)]) == 0  # a user stops it: that is no preemption
        assert (command.state.state, command.state.exit_code) == (run_state.INTERRUPTED, 130)
    finally:
        state = run_state.read(command.run)
        if state is not None and state.is_alive:
            os.kill(state.pid, signal.SIGKILL)


@pytest.mark.parametrize("flag", ["--preemption-exit-code=0", "--preemption-exit-code=256", "--preemption-grace-s=0"])
def test_wrong_values_are_one_line(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from raypod import train

    assert train.main([*INLINE, "--run-dir", str(tmp_path / "run"), flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag.partition("=")[0][2:].replace("-", "_") in line.replace("-", "_")
    assert not (tmp_path / "run").exists()
