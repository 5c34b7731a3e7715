"""The metrics of a run in the text format, the real Prometheus and promtool, and configs/observability."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Set

import pytest
import yaml

from raypod import events
from raypod.events import (
    CallDone,
    CallTimes,
    HeartbeatReport,
    HostUsage,
    InstanceStarted,
    PhaseBegun,
    RunStarted,
    UpdateDone,
)
from raypod.observe.status import launch_status, prometheus
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
from raypod.observe.status.token_server import TokenServer
from raypod.plan.layout import TOKEN_FILE
from raypod.plan.plan import Plan
from raypod.runs.call_times import STRAGGLER_RATIO
from raypod.runtime.workers.fleet import Beat
from tests.support import ROOT
from tests.support.bounded import wait_until

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


def test_a_run_counts_from_zero_and_has_its_position(status: RunStatus) -> None:
    found = scraped(status)
    assert (found['raypod_phase{phase="starting"}'], found["raypod_update_limit"]) == (1, 4)
    assert found['raypod_instance_up{instance="0",host="localhost"}'] == 0
    assert not [name for name in found if "timestamp" in name or "call_seconds" in name or "eta" in name]
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


def test_names_values_and_labels_follow_the_rules_of_the_format() -> None:
    assert all(re.fullmatch("raypod_[a-z_]+", metric.name) for metric in METRICS)
    assert {metric.kind for metric in METRICS} == {COUNTER, GAUGE, HISTOGRAM}
    assert all((metric.kind == COUNTER) == metric.name.endswith("_total") for metric in METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    labelled = [Sample(Labels((("path", 'a\\b"c\nd'),)), math.nan), Sample(Labels((("x", "é"),)), -math.inf)]
    samples = [*labelled, *(Sample(NO_LABELS, value) for value in (math.inf, 3, 0.1))]
    lines = render([Family("m", GAUGE, "one\ntwo \\", samples), Family("empty", COUNTER, "", [])]).splitlines()
    assert lines[:2] == ["# HELP m one\\ntwo \\\\", "# TYPE m gauge"]
    assert lines[2:] == ['m{path="a\\\\b\\"c\\nd"} NaN', 'm{x="é"} -Inf', "m +Inf", "m 3", "m 0.1"]


def test_promtool_has_no_objection(status: RunStatus, promtool: Any) -> None:
    train(status, calls=3)
    response = scrape_response(status)
    assert response.content_type == CONTENT_TYPE
    assert promtool("check", "metrics", input=response.body.decode()) == ""


SHIPPED = ROOT / "configs" / "observability"
ALERT = "RaypodInstanceSilent"


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def data(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=30) as response:
            return json.loads(response.read())["data"]

    def value(self, expression: str) -> Optional[float]:
        """The value of an expression with one result; None without a result, or while the server starts."""
        with contextlib.suppress(OSError):
            found = self.data("query", query=expression)["result"]
            return float(found[0]["value"][1]) if found else None
        return None

    def firing(self) -> List[Dict[str, str]]:
        return [each["labels"] for each in self.data("alerts")["alerts"] if each["state"] == "firing"]


@contextlib.contextmanager
def prometheus_of(folder: Path, port: int) -> Iterator[Prometheus]:
    """Serve with the shipped configuration and the shipped alert, with shorter times, for an endpoint at a port."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(folder / TOKEN_FILE)
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    rules = yaml.safe_load((SHIPPED / "alerts.yml").read_text())
    (silent,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == ALERT]
    assert "[1m]" in silent["expr"]
    silent["expr"] = silent["expr"].replace("[1m]", "[5s]")
    rules["groups"][0]["rules"] = [silent]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with TokenServer({}) as free:
        own_port = free.port
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        words = [*command, f"--web.listen-address=127.0.0.1:{own_port}"]
        server = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(own_port)
    finally:
        server.kill()
        server.wait()


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_run_is_scraped_and_the_alert_about_a_frozen_instance_fires(make: Any, tmp_path: Path) -> None:
    silent_s = 0.0

    def beats() -> Dict[int, Beat]:
        report = HeartbeatReport(0, "in call 1", 2.0, 1, 0.5, True, 1.0, HostUsage(0.5, 1, 2, 3, 4, 5, 6))
        return {index: Beat(report, time.monotonic() - silent_s * index) for index in (0, 1)}

    status = RunStatus(make(training={"updates": 9}, pod={"replicas": 2, "num_instances": 2}), beats)
    started = tuple(InstanceStarted(index, "h", 10, "emulated", "", 1, ()) for index in (0, 1))
    status.on_event(RunStarted("emulated", "", 0, 1, (), 1, started))
    for update in range(3):
        status.on_event(CallDone(update, (), tuple(CallTimes(index, 0.2, 0.0, 0.0) for index in (0, 1))))
        status.on_event(UpdateDone(update + 1, 1, {"loss": 0.5}, 1, 50.0, 1.0))
    with TokenServer({"/metrics": lambda query: scrape_response(status)}) as endpoint:
        endpoint.write_token(tmp_path / TOKEN_FILE)
        with prometheus_of(tmp_path, endpoint.port) as server:
            assert wait_until(lambda: server.value("raypod_updates_total") == 3), (tmp_path / "log").read_text()
            assert server.value("raypod_update_limit") == 9
            assert server.value('sum(raypod_instance_up{run="run"})') == 2
            assert server.value('raypod_instance_call_seconds_count{instance="1"}') == 2
            quantile = "histogram_quantile(0.95, sum by (le, instance) (raypod_instance_call_seconds_bucket))"
            assert server.data("query", query=quantile)["result"]
            types = server.data("metadata")
            assert types["raypod_instance_call_seconds"][0]["type"] == "histogram"
            assert types["raypod_updates_total"][0]["type"] == "counter"
            assert server.firing() == []
            silent_s = 12.0
            assert wait_until(
                lambda: [(each["alertname"], each["instance"]) for each in server.firing()] == [(ALERT, "1")]
            )
            silent_s = 0.0
            assert wait_until(lambda: server.firing() == [])


DASHBOARD: Dict[str, Any] = json.loads((SHIPPED / "grafana-dashboard.json").read_text())
PANELS: List[Dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
KNOWN = {metric.name for metric in (*prometheus.METRICS, *launch_status.METRICS)}


@pytest.fixture
def promtool(processes: None) -> Callable[..., str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool (package prometheus) is not installed")

    def run(*words: str, folder: Path = SHIPPED, **given: str) -> str:
        done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60, **given)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def names_in(text: str) -> Set[str]:
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"raypod_[a-z_]+", text)}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["expr"]


def test_the_expressions_of_the_configuration_and_the_dashboard_are_valid(promtool: Any, tmp_path: Path) -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    shutil.copy(SHIPPED / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    promtool("test", "rules", "alerts_test.yml", folder=tmp_path)
    rules = yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]
    tested = (tmp_path / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in rules if f'alertname="{rule["alert"]}"' not in tested] == []
    values = {"${prefix}": "", "$run": "a", "$__rate_interval": "1m"}
    rules = []
    for number, expression in enumerate(expressions()):
        for variable, value in values.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression
        rules.append({"record": f"a{number}", "expr": expression})
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=tmp_path)


def test_alerts_and_panels_use_known_metrics_and_panels_show_all_of_them() -> None:
    alerts = names_in((SHIPPED / "alerts.yml").read_text())
    shown = names_in(" ".join(expressions()))
    assert alerts | shown <= KNOWN
    not_shown = {"raypod_info", "raypod_start_time_seconds", "raypod_epoch", "raypod_samples_per_second"}
    not_shown |= {name for name in KNOWN if re.search("timestamp_seconds|wait_seconds_total|exit_code", name)}
    not_shown |= {"raypod_last_checkpoint_update", "raypod_instance_samples_per_second"}
    assert not_shown | shown >= KNOWN
    assert f"raypod_instance_busy_ratio > {STRAGGLER_RATIO}\n" in (SHIPPED / "alerts.yml").read_text()


def test_the_dashboard_is_complete_and_its_panels_do_not_overlap() -> None:
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", "prefix", "run"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    used: Set[Any] = set()
    for panel in DASHBOARD["panels"]:
        box = panel["gridPos"]
        assert box["x"] + box["w"] <= 24
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & used
        used |= cells
    for panel in PANELS:
        assert panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in (panel, *panel["targets"]) if target)


def test_the_documentation_lists_every_key(make: Callable[..., Plan]) -> None:
    text = (SHIPPED.parents[1] / "docs" / "reference/observability.md").read_text()
    plan = make(pod={"replicas": 2, "num_instances": 2})
    training = RunStatus(plan, dict).snapshot()
    launch = launch_status.LaunchStatus(plan.placement, ["true"]).snapshot()
    for state in (training, launch):
        assert [key for key in (*state, *state["instances"][0]) if f"`{key}`" not in text] == []
