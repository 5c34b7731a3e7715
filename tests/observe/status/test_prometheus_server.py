"""The real Prometheus server with the shipped configuration: the metrics of a run, and an alert that fires."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
import yaml

from raypod.events import CallDone, CallTimes, HeartbeatReport, HostUsage, InstanceStarted, RunStarted, UpdateDone
from raypod.observe.status.prometheus import scrape_response
from raypod.observe.status.run_status import RunStatus
from raypod.observe.status.token_server import TokenServer
from raypod.plan.layout import TOKEN_FILE
from raypod.runtime.workers.fleet import Beat
from tests.support import ROOT
from tests.support.bounded import wait_until

SHIPPED = ROOT / "configs" / "observability"
ALERT = "RaypodInstanceSilent"


class Prometheus:
    """The HTTP interface of a server."""

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
        """The labels of the alerts that fire."""
        return [each["labels"] for each in self.data("alerts")["alerts"] if each["state"] == "firing"]


@contextlib.contextmanager
def prometheus(folder: Path, port: int) -> Iterator[Prometheus]:
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
        server = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{own_port}"], stdout=log, stderr=subprocess.STDOUT
        )
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
        with prometheus(tmp_path, endpoint.port) as server:
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
