"""The coordinator's side of the mirror, and the process that mirrors a run folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import pytest

from raypod.errors import LeaseLost
from raypod.events import CheckpointSaved, PhaseBegun, UpdateDone
from raypod.plan.plan import Plan
from raypod.runs.upload import mirror as mirror_module
from raypod.runs.upload import mirror_record
from raypod.runs.upload.mirror import Mirror
from raypod.runs.upload.mirror_record import MirrorRecord
from raypod.system import companion
from raypod.system.companion import NOT_AGAIN, write_state
from tests.support.companions import FakeProcesses
from tests.support.mirrored_runs import (
    announce,
    different_files,
    finish,
    mirroring,
    reached,
    save,
    verified,
    write_run,
)
from tests.support.storage_servers import SECRET

TRAINS = UpdateDone(1, 1, {"loss": 1.0}, 8, 1.0, 1.0)
IDLE = PhaseBegun("training", 0)


class Mirrored(FakeProcesses):
    """A mirror with a scripted clock, its processes, its warnings and its lines."""

    def __init__(
        self, make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, left_s: Optional[float] = None, **run: Any
    ) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(mirror_module, "time", self.clock)
        self.warnings: List[str] = []
        self.lines: List[str] = []
        plan = make(run={"storage_path": "file:///remote", "storage_timeout_s": 9, **run})
        self.folder = Path(plan.run_dir)
        (self.folder / "summary.json").write_text("{}")
        self.mirror = Mirror(plan, self.warnings.append, self.lines.append, lambda: left_s)

    def __enter__(self) -> Mirrored:
        self.mirror.__enter__()
        self.mirror.on_event(TRAINS)
        return self

    def __exit__(self, *arguments: Any) -> None:
        self.mirror.__exit__(*arguments)

    def look(self, after_s: float, **remembered: Any) -> int:
        """Let the coordinator look after a time, when the process remembers something; return the number of starts."""
        if remembered:
            write_state(self.folder / "storage.json", MirrorRecord(**remembered))
        self.now_s += after_s
        self.mirror.on_event(IDLE)
        return len(self.started)

    def stored(self) -> Dict[str, Any]:
        return dict(json.loads((self.folder / "summary.json").read_text()).get("storage", {}))


Make = Callable[..., Mirrored]


@pytest.fixture
def mirrored(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **run: Mirrored(make, monkeypatch, **run)


def test_the_process_gets_the_settings_and_the_checkpoints_of_the_run(mirrored: Make) -> None:
    run = mirrored(keep_checkpoints=1, keep_remote=9)
    before = MirrorRecord("the run", "file:///remote/run", failures=7, error="of an earlier start")
    write_state(run.folder / "storage.json", before)
    with run:
        assert mirror_record.read(run.folder) == MirrorRecord("the run", "file:///remote/run")
        run.mirror.on_event(CheckpointSaved(4, "checkpoints/update-00000004", "0"))
        write_state(run.folder / "storage.json", MirrorRecord("the run", is_complete=True))
        run.started[0].hangs = False
    (process,) = run.started
    assert (process.module, process.log) == ("raypod.runs.upload.process", run.folder / "logs" / "storage.log")
    assert process.arguments[:2] == [str(run.folder), "file:///remote"]
    assert {"--keep=9", "--timeout-s=9.0", "--metric=accuracy", "--better=higher"} < set(process.arguments)
    assert process.lines == ["update-00000004"]
    assert (run.now_s, run.warnings, run.lines, run.stored()) == (50.0, [], [], {})


def test_a_process_that_hangs_costs_one_warning_and_the_time_limit(mirrored: Make) -> None:
    with mirrored() as run:
        run.look(30.0)
        assert run.warnings == []
        run.look(1.0)
        assert "file:///remote/run has not answered for 30 s; the run continues" in run.warnings[0]
        began_s = run.now_s
    assert run.now_s - began_s == pytest.approx(9.0, abs=0.06)
    assert run.started[0].stdin.closed
    assert len(run.warnings) == 1
    wait, line = run.lines
    limit = "9 s at most; Ctrl-C ends the wait"
    assert wait == f"waiting until storage file:///remote/run has the rest of the run ({limit})"
    missing = "everything since the last upload"
    assert line == f"storage file:///remote/run does not hold {missing} at the end of the run (--storage-timeout-s 9)"
    assert run.stored()["not_mirrored"] == [missing]


def test_before_an_enforced_end_what_is_missing_is_recorded(mirrored: Make) -> None:
    with mirrored(left_s=3.0) as run:
        run.look(0.5, place="x", pending=("a",))
        began_s = run.now_s
    assert run.now_s - began_s == pytest.approx(3.0, abs=0.06)
    assert run.lines[0].endswith("has the rest of the run (3 s at most; Ctrl-C ends the wait)")
    with os.fdopen(run.started[0]._reading) as unread:  # `end` would have closed it
        assert unread.read() == "", "the process continues"
    assert "run does not hold a at the end of the run (--preemption-grace-s); see" in run.warnings[0]
    assert run.stored()["not_mirrored"] == ["a"]


def test_an_error_is_one_warning_and_in_the_end_a_line_names_what_is_missing(mirrored: Make) -> None:
    error = {"error": "OSError: full", "last_error": "OSError: full"}
    with mirrored() as run:
        run.look(0.5, place="x", pending=tuple("abcd"), **error)
        run.look(1.0)
        run.look(2.0)
        run.started[0].code = NOT_AGAIN
        assert run.look(100.0) == 1, "a process that has found the place taken is not started again"
    (warning,) = run.warnings
    assert "run fails: OSError: full; the run continues, and the mirror tries again; see logs/storage.log" in warning
    (line,) = run.lines
    assert line.endswith("does not hold a, b, c, ... at the end of the run (--storage-timeout-s 9): OSError: full")
    assert run.stored()["not_mirrored"] == list("abcd")


def test_an_interrupt_of_the_wait_at_the_end_records_what_is_missing(mirrored: Make, monkeypatch: Any) -> None:
    def interrupt(seconds: float) -> None:
        write_state(run.folder / "storage.json", MirrorRecord("the run", place="x", pending=("a", "b")))
        raise KeyboardInterrupt

    run = mirrored()
    with pytest.raises(KeyboardInterrupt), run:
        monkeypatch.setattr(run.clock, "sleep", interrupt)
    assert run.started[0].stdin.closed
    (warning,) = run.warnings
    assert "run does not hold a, b at the end of the run (the wait for it was interrupted); see" in warning
    assert run.stored()["not_mirrored"] == ["a", "b"]
    assert mirror_record.read(run.folder).pending == ("a", "b")


@pytest.mark.parametrize("error", ["", "OSError: an outage"])
def test_a_process_that_dies_is_started_again_less_and_less_often(mirrored: Make, error: str) -> None:
    with mirrored() as run:
        write_state(run.folder / "storage.json", MirrorRecord(place="x", error=error))
        for number, pause_s in enumerate((1.0, 5.0, 30.0, 60.0, 60.0), start=1):
            run.started[-1].code = 75
            assert run.look(pause_s) == number
            assert len(run.warnings) == (1 if error or number > 1 else 0)
            assert run.look(1.0) == number + 1
            assert run.started[-2].stdin.closed
        run.started[-1].code = 75
    assert len(run.started) == 7, "once more for what is left at the end"
    assert len(run.warnings) == 1
    words = f"fails: {error or 'its process ends repeatedly'}; the run continues, and the mirror tries again"
    assert words in run.warnings[0]


def test_the_end_of_an_earlier_process_of_the_run_hides_nothing(mirrored: Make) -> None:
    with mirrored() as run:
        write_state(run.folder / "storage.json", MirrorRecord("the run", is_complete=True))
    assert "does not hold everything since the last upload at the end of the run" in run.warnings[0]
    assert run.stored()["not_mirrored"] == ["everything since the last upload"]
    assert not mirror_record.read(run.folder).is_complete


def test_a_run_that_another_process_has_taken_over_is_left_at_once(mirrored: Make) -> None:
    run = mirrored()
    run.mirror.on_event(TRAINS)
    run.mirror.__exit__(LeaseLost, LeaseLost("run", "pid 7"), None)
    assert (run.now_s, run.warnings, run.stored()) == (50.0, [], {})
    assert run.started[0].stdin.closed


def test_a_process_that_cannot_be_started_is_a_warning(mirrored: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    run = mirrored()
    monkeypatch.setattr(companion, "start_module", fail)
    with run:
        run.mirror.on_event(CheckpointSaved(4, "checkpoints/update-00000004", "0"))
    (warning,) = run.warnings
    assert "cannot be used: its process cannot be started: Resource temporarily unavailable" in warning


def test_the_process_uploads_what_it_is_told_and_ends_with_its_input(processes: None, url: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run")
    first = save(run, 1)
    with mirroring(run, url) as process:
        assert reached(run, 1)
        second = save(run, 2)
        announce(process, second)
        assert reached(run, 2)
        assert finish(process) == 0
    assert mirror_record.read(run).is_complete
    assert verified(url, "a run", tmp_path / "copy") == [first, second]
    assert not different_files(run, tmp_path / "copy")


def test_a_process_that_cannot_upload_shows_no_secret(processes: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_API_TOKEN", SECRET)
    (tmp_path / SECRET).touch()  # no folder
    run = write_run(tmp_path / "run")
    with mirroring(run, f"file://{tmp_path}/{SECRET}", "--timeout-s=3") as process:
        assert finish(process) == -signal.SIGKILL
    found = mirror_record.read(run)
    assert "***" in found.error
    assert (found.place, found.is_complete) == ("", False)
    assert "***" in (run / "logs" / "storage.log").read_text()
    assert not [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
