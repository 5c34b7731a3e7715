"""`ray job submit` of a script that calls `raypod.fit`, as docs/how-to/ray-jobs.md describes it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bounded import COMMAND_S
from documented import DOCS
from ray_cluster import ray_cluster

import raypod

for package in ("aiohttp", "aiohttp_cors", "smart_open"):
    pytest.importorskip(package, reason="Ray jobs need ray[default]", exc_type=ImportError)

# Ray's own code leaves sockets and files to the garbage collector, and warns of its own interfaces.
pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = "device='emulated', model='tiny', replicas=2, batch_size=4, updates=3, progress=False"
SCRIPT = f"""
import raypod
result = raypod.fit({FLAGS}, num_instances=2, run_dir=RUN_DIR)
print("trained", result.summary["weights_sha256"])
"""


def test_a_job_trains_in_the_cluster_of_the_job(tmp_path: Path) -> None:
    found = re.search(r"`(ray job submit [^`]*)`", (DOCS / "how-to/ray-jobs.md").read_text())
    assert found is not None
    words = [sys.executable if word == "python" else word for word in shlex.split(found.group(1))]
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").write_text(SCRIPT.replace("RUN_DIR", repr(str(tmp_path / "run"))))
    with ray_cluster(("",), num_cpus=2, include_dashboard=True, dashboard_port=0) as started:
        address = f"http://{started.nodes[0].webui_url}"
        command = [sys.executable, "-m", "ray.scripts.scripts", *words[1:3], "--address", address, *words[3:]]
        done = subprocess.run(
            command, cwd=tmp_path / "job", capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        groups = started.ray.util.placement_group_table().values()
        assert not [group for group in groups if group["state"] == "CREATED"]
    assert done.returncode == 0, done.stdout + done.stderr
    flags = {"device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4, "updates": 3}
    alone = raypod.fit(run_dir=tmp_path / "alone", fleet="inline", progress=False, **flags)
    assert f"trained {alone.summary['weights_sha256']}" in done.stdout
