"""The run folder: which one a run uses, which files it keeps, and the end of its run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional

import pytest

from raypod import train
from raypod.events import RunEnded, RunStarted, UpdateDone
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.runs import lease, run_folder, run_state, verify_data
from raypod.runs.metrics import MetricsAggregator, line_of
from raypod.runs.run_state import RunEndWatch, RunState
from raypod.runs.run_view import RunView
from raypod.system.process import process_start_ticks
from raypod.training.checkpoint.storage import list_checkpoints
from tests.support.documented import DOCS
from tests.support.faulty_disks import FlushedFiles

QUICK = ("--model", "tiny", "--lr-schedule", "constant", "--warmup-updates", "0")


def summary_of(run: Path) -> Dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def command(*flags: str) -> int:
    return train.main(["--fleet", "inline", "--device", "emulated", *flags])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run of 3 updates with 2 checkpoints."""
    run = tmp_path / "run"
    assert command(*QUICK, "--updates", "3", "--checkpoint-every", "2 updates", "--run-dir", str(run)) == 0
    return run


def test_a_loss_of_power_after_a_run_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    assert command(*QUICK, "--updates", "1", "--run-dir", str(tmp_path / "run")) == 0
    files = {path.name: path for path in (tmp_path / "run").iterdir() if path.suffix in (".json", ".jsonl", ".yaml")}
    assert {*files} > {"config.yaml", "plan.json", "state.json", "summary.json", "metrics.jsonl", "events.jsonl"}
    assert [name for name, path in files.items() if not flushed.survive(path)] == []
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {file.name for file in layout.TABLE}


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b'{"pid": 1, "sta'])
def test_a_state_damaged_by_a_loss_of_power_does_not_refuse_the_same_command(content: bytes, folder: Path) -> None:
    (folder / "state.json").write_bytes(content)
    assert command(*QUICK, "--updates", "3", "--run-dir", str(folder)) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize("how", ["--resume={}", "--resume={}/checkpoints/update-00000002", "run.resume={}"])
def test_a_run_resumes_in_its_folder_with_its_config(how: str, folder: Path) -> None:
    assert command(how.format(folder), "--updates", "5") == 0
    summary = summary_of(folder)
    assert (summary["updates"], Path(summary["checkpoint"]).parent) == (5, folder / "checkpoints")
    assert "model: tiny" in (folder / "config.yaml").read_text()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_run_resumes_not_in_another_ones(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    assert command(*QUICK, "--updates", "2", "--seed", "1", "--run-dir", str(other)) == 0
    cut_off(other)
    before = (other / "config.yaml").read_bytes()
    assert command("--resume", str(folder), "--updates", "5", "--run-dir", str(other)) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (other / "config.yaml").read_bytes() == before


def cut_off(folder: Path, *updates: int) -> None:
    """Remove checkpoints, and change the state file as if the coordinator had died."""
    for update in updates:
        shutil.rmtree(str(folder / "checkpoints" / f"update-{update:08d}"))
    state = json.loads((folder / "state.json").read_text())
    left = {**state, "state": "running", "exit_code": None, "started_ticks": 1}
    (folder / "state.json").write_text(json.dumps(left))


def starts_of(folder: Path) -> List[int]:
    return [line["first_update"] for line in lines_of(folder / "events.jsonl") if line["event"] == "run_started"]


def test_the_same_command_continues_a_resume(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, other = tmp_path / "new", tmp_path / "other"
    last = ["--updates", "6", "--checkpoint-every", "2 updates", "--run-dir", str(new)]
    assert command("--resume", str(folder), *last) == 0
    whole = summary_of(new)
    cut_off(new, 6)
    capsys.readouterr()
    assert command("--resume", str(folder), *last) == 0
    assert f"new began from {folder} already: continuing from update-00000004" in capsys.readouterr().err
    cut_off(new, 4, 6)  # it has no checkpoint of its own yet
    for _ in range(2):
        assert command("--resume", str(folder), *last) == 0
        assert summary_of(new)["weights_sha256"] == whole["weights_sha256"]
        assert [line["update"] for line in lines_of(new / "metrics.jsonl")] == [4, 5, 6]
        cut_off(new, 6)
    assert (starts_of(new), command("--resume", str(folder), *last, "--seed", "7")) == ([3, 4, 3, 4], 2)
    assert "training.seed is 42 and this run's is 7" in capsys.readouterr().err
    assert command(*QUICK, "--updates", "3", "--run-dir", str(other)) == 0
    assert command("--resume", str(other), *last) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert starts_of(new) == [3, 4, 3, 4]


def test_the_same_command_continues_from_an_old_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = folder / "checkpoints" / "update-00000002"
    flags = ["--resume", str(chosen), "--updates", "6", "--checkpoint-every", "1 updates", "--keep-checkpoints", "2"]
    assert command(*flags) == 0
    whole = summary_of(folder)
    assert not chosen.exists(), "it was removed, as older checkpoints are"
    cut_off(folder, 6)
    capsys.readouterr()
    for _ in range(2):
        assert command(*flags) == 0
        assert f"began from {chosen} already: continuing from update-00000005; to begin" in capsys.readouterr().err
        assert summary_of(folder)["weights_sha256"] == whole["weights_sha256"]
        assert [line["update"] for line in lines_of(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
        cut_off(folder, 6)
    assert starts_of(folder) == [0, 2, 5, 5]


def test_another_command_and_a_finished_run_begin_again_from_the_checkpoint(folder: Path) -> None:
    flags = ["--resume", str(folder / "checkpoints" / "update-00000002"), "--updates", "5"]
    assert command(*flags, "--keep-checkpoints", "9") == 0
    assert command(*flags) == 0, "the run has ended: it is done again"
    cut_off(folder)
    assert command(*flags, "--learning-rate", "0.01", "--resume-anyway", "learning_rate") == 0
    assert starts_of(folder) == [0, 2, 2, 2]
    cut_off(folder)
    assert command("--resume", str(folder), "--updates", "6") == 0
    assert starts_of(folder) == [0, 2, 2, 2, 5], "the run folder itself always continues"


@contextlib.contextmanager
def file_size_limit() -> Iterator[Callable[[], None]]:
    """Yield a function after which writes fail as on a full disk, within the context.

    A fixture would end too late: pytest first writes the result of the test, maybe into a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_files_of_a_run_unchanged_and_is_one_line_at_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    write_summary = run_folder.write_summary
    capsys.readouterr()
    with file_size_limit() as fill_disk:
        fill_disk()
        assert command("--resume", str(folder), "--updates", "5") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write into the run folder" in line
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    with file_size_limit() as fill_disk:
        fill = lambda *arguments: (fill_disk(), write_summary(*arguments))  # noqa: E731
        monkeypatch.setattr(run_folder, "write_summary", fill)
        assert command(*QUICK, "--updates", "2", "--run-dir", str(tmp_path / "other")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "summary.json cannot be written" in line


def test_it_continues_without_the_first_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--resume", str(folder / "checkpoints" / "update-00000002"), "--run-dir", str(tmp_path / "next")]
    assert command(*flags, "--updates", "4") == 0
    shutil.move(str(folder), str(tmp_path / "moved"))
    for updates in (5, 6):
        cut_off(tmp_path / "next")
        assert command(*flags, "--updates", str(updates)) == 0
        assert summary_of(tmp_path / "next")["updates"] == updates
    assert command(*flags[:2], "--run-dir", str(tmp_path / "moved"), "--updates", "5") == 2
    assert "there is no such run folder or checkpoint" in capsys.readouterr().err


def test_a_run_that_ends_after_a_rollback_has_the_metrics_of_its_last_update(make: Callable[..., Plan]) -> None:
    plan = make()
    metrics, folder = MetricsAggregator(plan, 0.0), Path(plan.run_dir)
    done = [UpdateDone(each, 1, {"loss": each + 0.5, "accuracy": 0.0}, 32 * each, 9.0, 2.0) for each in (10, 13)]
    view = RunView(plan)
    (folder / "metrics.jsonl").write_text(f"{json.dumps(line_of(done[0]))}\n")
    for event in (RunStarted("emulated", "", 0, 1, ()), done[1], RunEnded(10, True, "", None)):
        view.on_event(event)
    run_folder.write_summary(plan, metrics, view)
    assert (summary_of(folder)["updates"], summary_of(folder)["loss"]) == (10, 10.5)


def test_a_run_whose_output_is_on_a_full_disk_ends_as_usual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        patched.setattr("sys.stderr", full)
        assert command(*QUICK, "--updates", "2", "--run-dir", str(tmp_path / "run")) == 0
        full.flush()  # as Python does at its end, which would change the exit code
    assert summary_of(tmp_path / "run")["updates"] == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT])
def test_a_warning_per_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    real, failed = os.write, set()

    def write(descriptor: int, data: bytes) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".jsonl") and path not in failed:
            failed.add(path)
            raise OSError(number, os.strerror(number))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    run = tmp_path / "run"
    assert command(*QUICK, "--updates", "2", "--run-dir", str(run)) == 0
    names = {"metrics.jsonl", "evaluations.jsonl", "ledger.jsonl", "events.jsonl"}
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: cannot write ")]
    assert {Path(line.split()[3]).name for line in warnings} == {Path(path).name for path in failed} == names
    assert verify_data.verify(run).is_proved
    assert len(lines_of(run / "metrics.jsonl")) == 2
    assert lines_of(run / "events.jsonl")[0]["event"] == "process_started"


def test_a_resumed_run_counts_the_repairs_before_and_the_page_has_every_key_of_the_summary(folder: Path) -> None:
    assert summary_of(folder)["restarts"] == 0
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "repaired", "restarts": 2}\n')
    assert (command("--resume", str(folder), "--updates", "4"), summary_of(folder)["restarts"]) == (0, 2)
    table = (DOCS / "reference/run-folder.md").read_text().partition("## summary.json\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert {*summary_of(folder)} <= {*named}


def lines_of(path: Path) -> List[Dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not valid JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_same_command_finishes_a_run_that_died_in_its_last_evaluation(folder: Path) -> None:
    last = [*QUICK, "--updates", "3", "--run-dir", str(folder)]
    whole = summary_of(folder)
    (folder / "summary.json").unlink()
    (folder / "evaluations.jsonl").write_text('{"samples": 360, "lo')
    assert command(*last, "--resume", str(folder)) == 2  # the run is finished
    cut_off(folder)
    assert command(*last) == 0
    summary = summary_of(folder)
    for name in ("updates", "loss", "accuracy", "test_accuracy", "evaluations", "weights_sha256", "interrupted"):
        assert summary[name] == whole[name], name
    assert [each["update"] for each in lines_of(folder / "evaluations.jsonl")] == [3]


def accuracies(folder: Path) -> Dict[int, Optional[float]]:
    readable, damaged = list_checkpoints(folder / "checkpoints")
    assert not damaged
    return {each.update: each.manifest.tested.get("accuracy") for each in readable}


EPOCHS = (*QUICK, "--dataset", "synthetic", "--samples", "96", "--image", "1x8x8", "--evaluate-every", "1")


def test_evaluations_and_their_checkpoints_are_kept_over_several_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*EPOCHS, "--checkpoint-every", "2 updates", "--keep-checkpoints", "1", "--run-dir", str(run)]
    assert command(*flags, "--epochs", "3") == 0  # 3 updates each
    found = {each["update"]: each["accuracy"] for each in lines_of(run / "evaluations.jsonl")}
    assert list(found) == [3, 6, 9]
    best = max((3, 6), key=lambda update: (found[update], update))  # when the last one was written
    assert accuracies(run) == {update: found[update] for update in (best, 9)}
    (run / "summary.json").unlink()  # killed, then one more epoch
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text("".join(lines[:-1]))  # the last one is missed
    assert command(*flags, "--epochs", "4", "--resume", str(run)) == 0
    evaluations = summary_of(run)["evaluations"]
    assert [(each["update"], each["epoch"]) for each in evaluations] == [(3, 1), (6, 2), (9, 3), (12, 4)]
    assert lines_of(run / "evaluations.jsonl") == evaluations


def test_nan_is_written_as_null_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*EPOCHS, "--learning-rate", "1e30", "--on-nonfinite", "continue", "--run-dir", str(run)]
    assert command(*flags, "--epochs", "1") == 0
    assert command(*flags, "--epochs", "2", "--resume", str(run)) == 0
    losses = [line["loss"] for line in lines_of(run / "metrics.jsonl")]
    assert len(losses) == 6
    assert losses[-1] is None
    summary = (run / "summary.json").read_text()
    assert json.loads(summary)["loss"] is None
    assert [each["loss"] for each in lines_of(run / "evaluations.jsonl")] == [None, None]
    assert "NaN" not in summary + (run / "state.json").read_text()


def state(**changed: object) -> RunState:
    ticks = process_start_ticks(os.getpid()) or 0
    found = RunState(os.getpid(), ticks, os.uname().nodename, run_state.RUNNING, 3, 9)
    return dataclasses.replace(found, **changed)  # type: ignore[arg-type]


def write(folder: Path, content: RunState) -> None:
    (folder / layout.STATE).write_text(json.dumps(dataclasses.asdict(content)))


def test_a_run_ends_when_its_state_and_its_process_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = RunEndWatch(tmp_path)
    assert (watch.poll(), watch.is_known) == (None, False)
    write(tmp_path, state())
    assert (watch.poll(), watch.is_known) == (None, True)
    write(tmp_path, state(state=run_state.FAILED, exit_code=1))
    assert watch.poll() is None  # this process may print more
    monkeypatch.setattr(run_state, "_EXIT_S", 0.0)
    assert exit_code_of(watch) == 1
    write(tmp_path, state(started_ticks=1))  # a coordinator that is gone
    found = RunEndWatch(tmp_path).poll()
    assert (found.exit_code, found.state.update) == (None, 3)


def exit_code_of(watch: RunEndWatch) -> Optional[int]:
    found = watch.poll()
    return found.exit_code


def test_the_end_of_a_launch(tmp_path: Path) -> None:
    launch = {"pid": 1, "started_ticks": 1, "host": os.uname().nodename, "state": "running", "command": ["a"]}
    (tmp_path / layout.LAUNCH).write_text(json.dumps({**launch, "host": "elsewhere"}))
    watch = RunEndWatch(tmp_path)
    assert (watch.poll(), watch.is_known) == (None, True)
    for ended, exit_code in (({"state": "failed", "exit_code": 3}, 3), ({}, None)):
        (tmp_path / layout.LAUNCH).write_text(json.dumps({**launch, **ended}))
        assert exit_code_of(watch if ended else RunEndWatch(tmp_path)) == exit_code


@pytest.mark.parametrize("ahead_s", [-1200, -300, 300, 1200])
def test_the_clock_of_another_host_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int) -> None:
    """For the monitor, logs, report and dashboard: only a lease without new heartbeats ends."""
    now_s = 10000.0
    monkeypatch.setattr(run_state, "time", SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s))
    write(tmp_path, state(host="elsewhere"))
    holder = lease.Holder("owner", "elsewhere", "its boot", 1, 1, "today", lease.EXPIRES_AFTER_S)
    file = tmp_path / "lease-1.json"
    file.write_bytes(holder.content())
    watch = RunEndWatch(tmp_path)
    for _ in range(30):
        os.utime(str(file), (now_s + ahead_s, now_s + ahead_s))
        assert watch.poll() is None
        now_s += lease.HEARTBEAT_S
    now_s += lease.EXPIRES_AFTER_S
    assert exit_code_of(watch) is None
