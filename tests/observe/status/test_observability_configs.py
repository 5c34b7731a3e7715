"""configs/observability: the Prometheus configuration, the alerts and the Grafana dashboard agree with the metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Set

import pytest
import yaml

from raypod.observe.status import launch_status, prometheus
from raypod.observe.status.run_status import RunStatus
from raypod.plan.plan import Plan
from raypod.runs.call_times import STRAGGLER_RATIO
from tests.support import ROOT

FOLDER = ROOT / "configs" / "observability"
DASHBOARD: Dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
PANELS: List[Dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
KNOWN = {metric.name for metric in (*prometheus.METRICS, *launch_status.METRICS)}


@pytest.fixture
def promtool(processes: None) -> Callable[..., None]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool (package prometheus) is not installed")

    def run(*words: str, folder: Path = FOLDER) -> None:
        done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def names_in(text: str) -> Set[str]:
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"raypod_[a-z_]+", text)}


def expressions() -> Iterator[str]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["expr"]


def test_the_configuration_is_valid_and_each_alert_fires_for_its_cause_only(promtool: Any, tmp_path: Path) -> None:
    promtool("check", "config", "--syntax-only", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    promtool("test", "rules", "alerts_test.yml", folder=tmp_path)
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    tested = (tmp_path / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in rules if f'alertname="{rule["alert"]}"' not in tested] == []


def test_the_expressions_of_the_dashboard_are_valid(promtool: Callable[..., None], tmp_path: Path) -> None:
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
    alerts = names_in((FOLDER / "alerts.yml").read_text())
    shown = names_in(" ".join(expressions()))
    assert alerts | shown <= KNOWN
    not_shown = {"raypod_info", "raypod_start_time_seconds", "raypod_epoch", "raypod_samples_per_second"}
    not_shown |= {name for name in KNOWN if re.search("timestamp_seconds|wait_seconds_total|exit_code", name)}
    not_shown |= {"raypod_last_checkpoint_update", "raypod_instance_samples_per_second"}
    assert not_shown | shown >= KNOWN


def test_the_alert_about_stragglers_has_the_ratio_of_the_monitor() -> None:
    assert f"raypod_instance_busy_ratio > {STRAGGLER_RATIO}\n" in (FOLDER / "alerts.yml").read_text()


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
    text = (FOLDER.parents[1] / "docs" / "reference/observability.md").read_text()
    plan = make(pod={"replicas": 2, "num_instances": 2})
    training = RunStatus(plan, dict).snapshot()
    launch = launch_status.LaunchStatus(plan.placement, ["true"]).snapshot()
    for state in (training, launch):
        assert [key for key in (*state, *state["instances"][0]) if f"`{key}`" not in text] == []
