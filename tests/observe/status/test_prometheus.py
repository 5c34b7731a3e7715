"""The metrics of a run in the text format: names, values, escaping, and the judgement of the real promtool."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from typing import Callable, Dict

import pytest

from raypod import events
from raypod.events import CallDone, CallTimes, HeartbeatReport, HostUsage, InstanceStarted, PhaseBegun, UpdateDone
from raypod.observe.status.prometheus import (
    CONTENT_TYPE,
    COUNTER,
    GAUGE,
    HISTOGRAM,
    METRICS,
    NO_LABELS,
    Family,
    Labels,
    Sample,
    render,
    scrape_response,
)
from raypod.observe.status.run_status import RunStatus
from raypod.plan.plan import Plan
from raypod.runtime.workers.fleet import Beat

USAGE = HostUsage(None, 1, 2, 3, 4, 5, 6)
STARTED = tuple(InstanceStarted(index, f"h{index}", 10 + index, "emulated", "", 1, ()) for index in range(2))


@pytest.fixture
def status(make: Callable[..., Plan]) -> RunStatus:
    """The status of a run of two instances before its start."""
    plan = make(training={"updates": 4, "batch_size": 1}, pod={"replicas": 4, "num_instances": 2})
    beat = HeartbeatReport(0, "in call 1", 2.0, 1, 0.5, True, 1.0, USAGE)
    return RunStatus(plan, lambda: {0: Beat(beat, 0.0)})


def scraped(status: RunStatus) -> Dict[str, float]:
    """Return the samples of a scrape by name and labels, without the label of the run."""
    lines = [line for line in scrape_response(status).body.decode().splitlines() if not line.startswith("#")]
    found = [re.sub(r'\{run="run",?', "{", line).replace("{}", "").rpartition(" ") for line in lines]
    return {name: float(value) for name, _, value in found}


def train(status: RunStatus, calls: int) -> None:
    status.on_event(events.RunStarted("emulated", "", 2, 1, (), 3, STARTED))
    status.on_event(PhaseBegun("training", 2))
    for update in range(2, 2 + calls):
        status.on_event(CallDone(update, (), (CallTimes(0, 0.2, 0.1, 0.05), CallTimes(1, 0.002, 0.0, 0.0))))
        rates = {"words_per_s": 7.0}
        status.on_event(UpdateDone(update + 1, 1, {"loss": math.nan}, 1, 50.0, 1.0, 0.25, part_rates=rates))


def test_a_run_before_its_first_update_has_no_unknown_values(status: RunStatus) -> None:
    found = scraped(status)
    assert (found['raypod_phase{phase="starting"}'], found["raypod_update_limit"]) == (1, 4)
    assert found['raypod_instance_up{instance="0",host="localhost"}'] == 0
    assert not [name for name in found if "timestamp" in name or "call_seconds" in name or "eta" in name]


def test_a_resumed_run_counts_from_zero_and_has_its_position(status: RunStatus) -> None:
    train(status, calls=2)
    found = scraped(status)
    assert (found["raypod_updates_total"], found["raypod_update"], found["raypod_generation"]) == (2, 4, 3)
    assert (found["raypod_samples_total"], found["raypod_samples_per_second"]) == (8, 50)
    assert (found["raypod_data_wait_ratio"], found['raypod_sample_parts_per_second{part="words"}']) == (0.25, 7)
    assert math.isnan(found['raypod_training_metric{name="loss"}'])
    assert found['raypod_phase{phase="training"}'] == 1
    assert sum(value for name, value in found.items() if name.startswith("raypod_phase")) == 1


def test_the_calls_are_a_histogram_of_each_instance(status: RunStatus) -> None:
    train(status, calls=3)
    found, first = scraped(status), 'instance="0",host="h0"'
    assert found[f'raypod_instance_call_seconds_bucket{{{first},le="0.1"}}'] == 0
    assert found[f'raypod_instance_call_seconds_bucket{{{first},le="0.25"}}'] == 2  # the first call is not counted
    assert found[f'raypod_instance_call_seconds_bucket{{{first},le="+Inf"}}'] == 2
    assert found[f"raypod_instance_call_seconds_count{{{first}}}"] == 2
    assert found[f"raypod_instance_call_seconds_sum{{{first}}}"] == pytest.approx(0.4)
    assert found[f"raypod_instance_data_wait_seconds_total{{{first}}}"] == pytest.approx(0.2)
    assert found[f"raypod_instance_busy_ratio{{{first}}}"] > 1.25
    assert found[f"raypod_instance_heartbeat_age_seconds{{{first}}}"] > 0
    assert found['raypod_host_disk_size_bytes{host="h0"}'] == 6
    assert 'raypod_host_cpu_ratio{host="h0"}' not in found


def test_faults_checkpoints_and_evaluations_are_counted(status: RunStatus) -> None:
    train(status, calls=1)
    up = 'raypod_instance_up{instance="1",host="h1"}'
    assert scraped(status)[up] == 1
    status.on_event(events.InstanceLost(1, "h1", "died", "killed", "", "", ""))
    assert scraped(status)[up] == 0
    status.on_event(events.Repaired((1,), ("h1",), "instance 0", 3, 1.0, 1, 4, (), STARTED))
    status.on_event(events.CheckpointSaved(3, "update-3", "0"))
    status.on_event(events.CheckpointFailed(3, "update-3", "full", ""))
    status.on_event(events.EvaluationDone(1, {"loss": 2.0}, 3, 1))
    found = scraped(status)
    assert (found[up], found["raypod_restarts_total"], found["raypod_generation"]) == (1, 1, 4)
    assert (found["raypod_checkpoints_total"], found["raypod_checkpoint_failures_total"]) == (1, 1)
    assert found["raypod_last_checkpoint_timestamp_seconds"] > 1e9
    assert found['raypod_evaluation_metric{name="loss"}'] == 2


def test_values_and_labels_are_written_as_the_format_requires() -> None:
    labelled = [Sample(Labels((("path", 'a\\b"c\nd'),)), math.nan), Sample(Labels((("x", "é"),)), -math.inf)]
    samples = [*labelled, *(Sample(NO_LABELS, value) for value in (math.inf, 3, 0.1))]
    lines = render([Family("m", GAUGE, "one\ntwo \\", samples), Family("empty", COUNTER, "", [])]).splitlines()
    assert lines[:2] == ["# HELP m one\\ntwo \\\\", "# TYPE m gauge"]
    assert lines[2:] == ['m{path="a\\\\b\\"c\\nd"} NaN', 'm{x="é"} -Inf', "m +Inf", "m 3", "m 0.1"]


def test_names_follow_the_rules_of_prometheus() -> None:
    assert all(re.fullmatch("raypod_[a-z_]+", metric.name) for metric in METRICS)
    assert {metric.kind for metric in METRICS} == {COUNTER, GAUGE, HISTOGRAM}
    assert all((metric.kind == COUNTER) == metric.name.endswith("_total") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is not installed")
def test_promtool_has_no_objection(status: RunStatus) -> None:
    train(status, calls=3)
    response = scrape_response(status)
    assert response.content_type == CONTENT_TYPE
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=response.body, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
