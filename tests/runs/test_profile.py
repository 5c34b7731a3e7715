"""The profile of a run: its window, what is recorded, aligned clocks, and the trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import pytest

from raypod import train
from raypod.errors import ConfigError
from raypod.events import CallReport, ClockReading, InstanceStarted, ProcessSpans, Span
from raypod.plan.layout import PROFILE
from raypod.plan.plan import Plan, Segment, rounding_of, window_of
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.profile import ProfileSource, ProfileWriter, merged
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.ray_nodes import best_reading
from raypod.runtime.workers.scripted import ScriptedFleet
from raypod.system import spans

FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--lr-schedule", "constant"]
POD = {"replicas": 4, "num_instances": 2}


class Profiled(ScriptedFleet):
    """Every call of an instance is a span of 1 s at the update's second; the clock of instance 1 is 100 s ahead."""

    def run(self, segment: Segment, stop_requested: Callable[[], bool]) -> Iterator[CallReport]:
        for report in super().run(segment, stop_requested):
            began_s = report.first_update + 100.0 * report.instance
            call = Span(f"in call {report.first_update + 1}", "call", began_s, began_s + 1, "instance_0")
            found = ProcessSpans(report.instance, f"h{report.instance}", 7, (call,))
            yield CallReport(report.instance, report.first_update, report.sums, profile=found)

    def started(self) -> List[InstanceStarted]:
        return [InstanceStarted(index, f"h{index}", 7, "emulated", "", 1, ()) for index in (0, 1)]

    def clocks(self) -> Dict[int, ClockReading]:
        return {0: ClockReading(0.0, 0.0), 1: ClockReading(100.0, 0.001)}


def written(plan: Plan, fleet: ScriptedFleet, warnings: Optional[List[str]] = None) -> Tuple[Any, List[int]]:
    """Return the profile of a run, and the updates after which the file existed."""
    path, existed = Path(plan.run_dir) / PROFILE, []
    path.parent.mkdir(exist_ok=True)
    window = window_of(plan)
    assert window is not None
    source = ProfileSource(fleet.clocks, lambda: fleet.call("take_profile"))
    warn = pytest.fail if warnings is None else warnings.append
    metrics = MetricsAggregator(plan, 0.0)
    with ProfileWriter(plan, window, source, warn, 0.0) as writer:
        for event in coordinator.run(plan, fleet, metrics):
            writer.on_event(event)
            existed += [metrics.position] if path.exists() else []
    return json.loads(path.read_text()) if path.exists() else None, existed


def test_the_window_is_written_once_it_is_complete_with_aligned_clocks(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 9}, pod=POD, run={"profile": "updates 3-5"})
    profile, existed = written(plan, Profiled(plan))
    assert existed[0] == 5
    calls = [event for event in profile["traceEvents"] if event.get("cat") == "call"]
    expected = [(f"in call {update}", process, (update - 1) * 1e6) for update in (3, 4, 5) for process in (2, 3)]
    assert sorted((call["name"], call["pid"], call["ts"]) for call in calls) == expected
    names = {event["pid"]: event["args"]["name"] for event in profile["traceEvents"] if event["name"] == "process_name"}
    assert names == {1: "coordinator", 2: "instance 0 on h0, pid 7", 3: "instance 1 on h1, pid 7"}
    (part,) = profile["metadata"]["parts"]
    assert part["updates"] == [3, 5]
    assert [(each["offset_s"], each["error_s"]) for each in part["clocks"]] == [(0.0, 0.0), (100.0, 0.001)]
    counters = [event["args"]["value"] for event in profile["traceEvents"] if event["name"] == "loss"]
    assert counters == [0.75] * 3
    phases = [event["name"] for event in profile["traceEvents"] if event.get("cat") == "phase"]
    assert phases == ["training"]


def test_a_window_until_the_last_update_contains_the_end_of_the_run(make: Callable[..., Plan]) -> None:
    class HasMore(Profiled):
        def call(self, method: str, *arguments: Any) -> List[Any]:
            if method == "take_profile":
                rest = Span("evaluate", "phase", 50.0, 51.0, "instance_0")
                return [ProcessSpans(0, "h0", 7, (rest,), dropped=3), ProcessSpans(1, "h1", 7, ())]
            return super().call(method, *arguments)

    plan = make(training={"updates": 4}, pod=POD, run={"profile": "updates 4-4"})
    warnings: List[str] = []
    profile, _ = written(plan, HasMore(plan), warnings)
    names = [event["name"] for event in profile["traceEvents"] if event.get("cat") in ("call", "phase")]
    assert {*names} == {"in call 4", "evaluate", "training", "saving", "evaluating", "ending"}
    assert profile["metadata"]["parts"][0]["dropped_spans"] == 3
    (warning,) = warnings
    assert "lacks 3 spans" in warning


def test_a_profile_that_cannot_be_written_is_a_warning(make: Callable[..., Plan]) -> None:
    plan, warnings = make(training={"updates": 3}, pod=POD, run={"profile": "update 2"}), []  # type: ignore[var-annotated]
    (Path(plan.run_dir) / PROFILE).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        written(plan, Profiled(plan), warnings)  # reads the folder
    (warning,) = warnings
    assert "cannot write the profile" in warning


WRONG = {
    **dict.fromkeys(("20-25", "epochs 1-2", "updates 2-"), "write a range of updates"),
    "updates 25-20": "write updates 20-25",
    "updates 0-3": "the first update is 1",
    "updates 3-9999": "the run has 12 updates",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_range_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*FLAGS, "--updates", "12", "--profile", text, "--run-dir", str(tmp_path / "run")]
    assert train.main(argv) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert WRONG[text] in line
    assert not (tmp_path / "run").exists()


def test_calls_of_several_updates_are_rounded_outwards(make: Callable[..., Plan]) -> None:
    plan = make(training={"updates": 16, "device_iterations": 4}, run={"profile": "updates 6-9"})
    assert window_of(plan) == range(4, 12)
    assert str(rounding_of(plan)).endswith("records the updates 5-12: whole calls of 4 updates")
    assert rounding_of(make(training={"updates": 16, "device_iterations": 4}, run={"profile": "updates 5-8"})) is None
    assert window_of(make()) is None


def test_a_run_and_one_that_is_resumed_inside_the_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sha256(name: str) -> Any:
        return json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"]

    run, plain = str(tmp_path / "run"), str(tmp_path / "plain")
    assert train.main([*FLAGS, "--updates", "6", "--run-dir", plain]) == 0
    profiled = [*FLAGS, "--profile", "updates 2-5"]
    assert train.main([*profiled, "--updates", "6", "--run-dir", run, "--checkpoint-every", "3 updates"]) == 0
    assert sha256("run") == sha256("plain")
    first = json.loads((tmp_path / "run" / PROFILE).read_text())
    kinds = {event.get("cat") for event in first["traceEvents"]}
    assert kinds >= {"start", "phase", "call", "data wait", "loading", "reduction", "save"}
    assert not spans.recorder.is_on

    resumed = str(tmp_path / "run" / "checkpoints" / "update-00000003")
    assert train.main(["--resume", resumed, "--updates", "6", "--run-dir", run]) == 0
    both = json.loads((tmp_path / "run" / PROFILE).read_text())
    assert [part["updates"] for part in both["metadata"]["parts"]] == [[2, 5], [4, 5]]
    calls = [event for event in both["traceEvents"] if event.get("cat") == "call"]
    assert len(calls) == 4 + 2
    assert max(call["ts"] for call in calls[:4]) < min(call["ts"] for call in calls[4:])

    assert train.main(["--resume", run, "--updates", "8"]) == 0  # after the window
    assert json.loads((tmp_path / "run" / PROFILE).read_text()) == both
    capsys.readouterr()


def test_the_fastest_reply_counts_and_all_replies_have_a_bound() -> None:
    delays = iter([0.02, 0.001, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02])

    def ask() -> float:
        half_s = next(delays)
        time.sleep(half_s)
        clock_s = time.monotonic() + 1000
        time.sleep(half_s)
        return clock_s

    reading = best_reading(ask, time.monotonic() + 60)
    assert abs(reading.offset_s - 1000) <= reading.error_s
    assert best_reading(lambda: None, time.monotonic() + 60) is None
    assert best_reading(ask, time.monotonic() - 1) is None


def test_spans_of_threads_that_have_not_ended_are_taken_once() -> None:
    recorder, began, finish = spans.recorder, threading.Event(), threading.Event()

    def work() -> None:
        with spans.measured("work", "phase"):
            began.set()
            finish.wait(60)

    recorder.reset(is_on=True)
    thread = threading.Thread(target=work, name="worker")
    thread.start()
    try:
        assert began.wait(60)
        with spans.measured("this", "call"):
            pass
        taken, dropped = recorder.take(with_open=True)
        assert [(span.name, span.thread) for span in taken] == [("this", "MainThread"), ("work", "worker")]
        assert dropped == 0
    finally:
        finish.set()
        thread.join()
        assert recorder.take() == ((), 0)
        recorder.reset(is_on=False)
    with spans.measured("nothing", "call"):
        pass
    assert recorder.take() == ((), 0)


def test_spans_are_bounded_and_processes_of_later_parts_have_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "MAX_SPANS", 2)
    recorder = spans.SpanRecorder()
    for number in range(5):
        recorder.add(str(number), "call", 0.0, 1.0)
    taken, dropped = recorder.take()
    assert (len(taken), dropped) == (2, 3)
    assert recorder.take() == ((), 0)

    def part(origin_s: float) -> Dict[str, Any]:
        events = [{"name": "call", "ph": "X", "pid": process, "ts": 1.0} for process in (1, 2)]
        return {"traceEvents": events, "metadata": {"parts": [{"origin_unix_s": origin_s}]}}

    events = merged(part(10.0), part(11.0))["traceEvents"]
    assert [(event["pid"], event["ts"]) for event in events] == [(1, 1.0), (2, 1.0), (3, 1e6 + 1), (4, 1e6 + 1)]
