"""Ray jobs: a script that calls `raypod.fit`, submitted as docs/how-to/ray-jobs.md describes it, and detached runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, Iterator

import pytest

import raypod
from raypod.cli import detached
from raypod.plan.cluster import LOCAL
from raypod.runs import run_state
from raypod.runs.run_state import RunState
from raypod.runtime.workers.ray_jobs import JobServer, find_job_server
from raypod.training.checkpoint import storage
from tests.support.bounded import COMMAND_S, wait_until
from tests.support.documented import DOCS
from tests.support.ray_cluster import RayCluster, ray_cluster

for package in ("aiohttp", "aiohttp_cors", "smart_open"):
    pytest.importorskip(package, reason="Ray jobs need raypod[pod]", exc_type=ImportError)

# Ray's own code leaves sockets and files to the garbage collector, and warns of its own interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")
TINY = {"device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A Ray cluster with a job server."""
    ports = {"dashboard_port": 0, "dashboard_agent_listen_port": 0}  # its own: another cluster can use 52365
    with ray_cluster(("",), num_cpus=2, include_dashboard=True, **ports) as started:
        JobServer(f"http://{started.nodes[0].webui_url}", started.cluster.address).submit("ready", "true", {})
        yield started


def weights_of_inline(folder: Path, **flags: Any) -> str:
    result = raypod.fit(run_dir=folder, fleet="inline", progress=False, **TINY, **flags)
    return str(result.summary["weights_sha256"])


def test_a_job_trains_in_the_cluster_of_the_job(cluster: RayCluster, tmp_path: Path) -> None:
    found = re.search(r"`(ray job submit [^`]*)`", (DOCS / "how-to/ray-jobs.md").read_text())
    words = [sys.executable if word == "python" else word for word in shlex.split(found.group(1))]
    (tmp_path / "job").mkdir()
    flags = {**TINY, "updates": 3, "num_instances": 2, "run_dir": str(tmp_path / "run"), "progress": False}
    script = f"import raypod\nprint('trained', raypod.fit(**{flags!r}).summary['weights_sha256'])\n"
    (tmp_path / "job" / "train.py").write_text(script)
    address = f"http://{cluster.nodes[0].webui_url}"
    command = [sys.executable, "-m", "ray.scripts.scripts", *words[1:3], "--address", address, *words[3:]]
    done = subprocess.run(command, cwd=tmp_path / "job", capture_output=True, text=True, timeout=COMMAND_S, check=False)
    groups = cluster.ray.util.placement_group_table().values()
    assert not [group for group in groups if group["state"] == "CREATED"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trained {weights_of_inline(tmp_path / 'alone', updates=3)}" in done.stdout


def test_a_detached_run_is_a_job_that_ray_can_stop_and_the_same_command_continues(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.cluster.address)
    run = tmp_path / "run"
    flags = ["--device", "emulated", "--model", "tiny", "--replicas", "2", "--batch-size", "4", "--num-instances", "2"]
    command = [sys.executable, "-m", "raypod.train", *flags, "--epochs", "10", "--run-dir", str(run), "--detach"]

    def detach() -> RunState:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        assert done.returncode == 0, done.stderr
        state = run_state.read(run)
        assert f"Ray job: {state.submission_id} on http://" in done.stdout
        return state

    server, first = find_job_server(LOCAL), detach()
    assert server.url == f"http://{cluster.nodes[0].webui_url}"
    assert wait_until(lambda: len((run / "metrics.jsonl").read_text().splitlines()) > 2)
    server.stop(str(first.submission_id))
    assert detached.attach(run) == 130
    assert wait_until(lambda: server.job(str(first.submission_id)).status == "STOPPED")
    state = run_state.read(run)
    assert storage.latest_name(run) == f"update-{state.update:08d}"
    output = (run / "logs" / "coordinator.log").read_text()
    assert wait_until(lambda: logs_of(server, first).endswith(output)), logs_of(server, first)
    second = detach()
    assert second.submission_id != first.submission_id
    assert detached.attach(run) == 0
    assert wait_until(lambda: server.job(str(second.submission_id)).status == "SUCCEEDED")
    trained = json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert trained == weights_of_inline(tmp_path / "alone", epochs=10)


def logs_of(server: JobServer, state: RunState) -> str:
    """Return what `ray job logs` prints; its first lines are Ray's."""
    with urllib.request.urlopen(f"{server.url}/api/jobs/{state.submission_id}/logs", timeout=COMMAND_S) as answer:
        return str(json.load(answer)["logs"])
