"""A run under Ray, scraped by the real Prometheus server: its metrics, and the alert about a frozen instance."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
import yaml
from bounded import COMMAND_S, wait_until

from raypod.record import run_state
from raypod.status.endpoint import TOKEN_FILE
from raypod.status.token_server import TokenServer

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "observability"
ALERT = "RaypodInstanceSilent"


def free_port() -> int:
    with TokenServer({}) as server:
        return server.port


@contextlib.contextmanager
def process(*words: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has ended when the context is left."""
    with output.open("wb") as file:
        started = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(COMMAND_S)
        finally:
            started.kill()
            started.wait()


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


def configure(folder: Path, run_dir: Path, port: int) -> Path:
    """The shipped configuration and rules for a run, with shorter times."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(run_dir / TOKEN_FILE)
    job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    rules = yaml.safe_load((SHIPPED / "alerts.yml").read_text())
    (silent,) = [rule for rule in rules["groups"][0]["rules"] if rule["alert"] == ALERT]
    assert "[1m]" in silent["expr"]
    silent["expr"] = silent["expr"].replace("[1m]", "[5s]")
    rules["groups"][0]["rules"] = [silent]
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def pid_of_instance(run_dir: Path, instance: int, port: int) -> int:
    token = (run_dir / TOKEN_FILE).read_text().strip()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/status", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return int(json.loads(response.read())["instances"][instance]["pid"])


def test_a_run_is_scraped_and_the_alert_about_a_frozen_instance_fires(tmp_path: Path) -> None:
    run_dir, port, own_port = tmp_path / "frozen run", free_port(), free_port()
    config = configure(tmp_path, run_dir, port)
    train = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--replicas", "2", "--num-instances", "2"]
    train += ["--batch-size", "8", "--epochs", "1000", "--status-port", str(port), "--run-dir", str(run_dir)]
    train += ["run.silent_after_s=300", "run.stuck_after_s=300"]
    serve = ["prometheus", f"--config.file={config}", f"--web.listen-address=127.0.0.1:{own_port}"]
    serve += [f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=warn"]
    server = Prometheus(own_port)
    with process(*serve, output=tmp_path / "prometheus.log"), process(*train, output=tmp_path / "run.log") as run:
        assert wait_until(lambda: (server.value("raypod_updates_total") or 0) > 20, COMMAND_S), (
            tmp_path / "run.log"
        ).read_text() + (tmp_path / "prometheus.log").read_text()
        of_run = '{run="frozen run"}'
        assert server.value(f"raypod_update_limit{of_run}") == 1000 * 89
        assert server.value('raypod_phase{run="frozen run",phase="training"}') == 1
        assert server.value(f"sum(raypod_instance_up{of_run})") == 2
        calls = 'raypod_instance_call_seconds_count{instance="1"}'
        assert wait_until(lambda: (server.value(f"rate({calls}[10s])") or 0) > 0)
        quantile = "histogram_quantile(0.95, sum by (le, instance) (raypod_instance_call_seconds_bucket))"
        assert 0 < (server.value(quantile) or 0) <= 300
        types = server.data("metadata")
        assert types["raypod_instance_call_seconds"][0]["type"] == "histogram"
        assert types["raypod_updates_total"][0]["type"] == "counter"
        assert server.firing() == []

        frozen = pid_of_instance(run_dir, 1, port)
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert wait_until(lambda: [each["instance"] for each in server.firing()] == ["1"])
            assert [each["alertname"] for each in server.firing()] == [ALERT]
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert wait_until(lambda: server.firing() == [])
        run.send_signal(signal.SIGTERM)
        assert run.wait(COMMAND_S) == 130
        assert wait_until(lambda: server.value("up") == 0)
    state = run_state.read(run_dir)
    assert state is not None
    assert (state.status_port, (run_dir / TOKEN_FILE).exists()) == (None, False)
