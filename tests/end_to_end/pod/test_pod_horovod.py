"""A real Horovod across the hosts of an emulated pod whose own names resolve to 127.0.1.1, as on Debian."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Iterator, Optional

import pytest

from tests.support.emulated_pod import ROOT, EmulatedPod, copy_source, skip_reason, train_here

HOSTS = 2
CLUSTER = "cluster/pod64.yaml"
TRAINING = ("--num-instances", "2", "--replicas", "4", "--device", "emulated", "--updates", "40")
PYTHON = os.environ.get("HOROVOD_PYTHON", "")


def _skip_reason() -> Optional[str]:
    if not PYTHON:
        return (
            "HOROVOD_PYTHON does not name the interpreter of an environment with scripts/install_horovod.sh's Horovod"
        )
    return skip_reason()


pytestmark = [pytest.mark.pod, pytest.mark.skipif(_skip_reason() is not None, reason=str(_skip_reason()))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    copy_source(folder, HOSTS)
    return folder


@pytest.fixture(scope="module")
def pod(shared: Path) -> Iterator[EmulatedPod]:
    """The pod, with a Ray cluster that `raypod up` started."""
    made = EmulatedPod(f"h{os.getpid()}", HOSTS, shared, venv=str(Path(PYTHON).parent.parent))
    try:
        made.run("op", "bash", "-c", f"cd {shared} && python -m raypod up {CLUSTER}", within_s=200)
        yield made
    finally:
        made.down()


def test_doctor_accepts_the_corrected_build(pod: EmulatedPod, shared: Path) -> None:
    output = pod.run("op", "bash", "-c", f"cd {shared} && python -m raypod doctor --cluster {CLUSTER}")
    assert "0.28.1+gloo.iface" in output


def test_a_training_with_horovod_has_the_weights_of_one_without(pod: EmulatedPod, shared: Path, tmp_path: Path) -> None:
    assert f"127.0.1.1 host{HOSTS}" in pod.run("on", str(HOSTS), "cat", "/etc/hosts")
    flags = f"--cluster {shared}/{CLUSTER} --run-dir {shared}/run --collectives horovod {' '.join(TRAINING)}"
    command = pod.start(1, f"cd {ROOT} && exec python -m raypod.train {flags}", shared / "out")
    assert command.wait(200) == 0, (shared / "out").read_text()
    with train_here(tmp_path, *TRAINING, "--collectives", "gloo") as other:
        assert other.wait(200) == 0, (tmp_path / "out").read_text()
    ours, theirs = (json.loads((folder / "run" / "summary.json").read_text()) for folder in (shared, tmp_path))
    assert ours["weights_sha256"] == theirs["weights_sha256"]


def test_the_seeding_benchmark_runs_with_horovod() -> None:
    command = [PYTHON, str(ROOT / "scripts" / "bench_seeding.py"), "--hosts", "2", "--large-hosts"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([*command, "--rounds", "1"], env=environment, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hvd: the installed Horovod" in done.stdout
