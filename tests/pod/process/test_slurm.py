"""`cluster/slurm.sh` on two Ray nodes of this machine, with a fake Slurm that runs the steps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import psutil
import pytest

from raypod import train
from raypod.__main__ import main
from raypod.runs import run_state
from tests.support import ROOT, SUPPORT
from tests.support.bounded import COMMAND_S, GONE_WITHIN_S, wait_until

SCRIPT = ROOT / "cluster" / "slurm.sh"
SECOND_NODE = "127.0.0.2"
UPDATES, CODE = 60, 85
FLAGS = ["--device", "emulated", "--dataset", "preemptible:data", "--model", "preemptible:model", "--no-augment"]
FLAGS += ["--lr-schedule", "constant", "--updates", str(UPDATES), "--checkpoint-every", "10 updates"]

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
assert set(options) <= {{"--overlap", "--nodes", "--ntasks", "--ntasks-per-node", "--nodelist", "--exclude"}}, options
nodes = os.environ["FAKE_NODES"].split(",")
nodes = [each for each in nodes if each == options.get("--nodelist", each) and each != options.get("--exclude")]
assert len(nodes) == int(options["--nodes"]) == int(options["--ntasks"]), (nodes, options)
tasks = []
def end(number, frame):
    for task in tasks:
        task.send_signal(signal.SIGTERM)
signal.signal(signal.SIGTERM, end)
for rank, node in enumerate(nodes):
    env = {{**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(rank)}}
    tasks.append(subprocess.Popen(words, env=env, start_new_session=True))
codes = [task.wait() for task in tasks]
sys.exit(next((code for code in codes if code), 0))
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") test "$3" = "$SLURM_JOB_NODELIST" && echo "$FAKE_NODES" | tr , '\\n' ;;
  requeue*) echo "$2" >>requeued ;;
  *) exit 1 ;;
esac
"""
# For jobs without Ray: `ray start` only writes the address of the cluster, or fails once for each line of `failures`,
# and `cluster-file` does nothing.
PYTHON = f"""#!/bin/sh
case "$*" in
  *"ray.scripts.scripts start"*)
    if test -s failures; then sed -i 1d failures; exit 1; fi
    mkdir -p "$RAY_TMPDIR/ray"; echo ":$RAYPOD_RAY_PORT" >"$RAY_TMPDIR/ray/ray_current_cluster"; exec sleep 600 ;;
  *cluster-file*) ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


class Job:
    def __init__(self, folder: Path, temporary: str, python: str, *flags: str) -> None:
        find = [sys.executable, "-c", "import ray; print(ray.util.get_node_ip_address())"]  # it changes the environment
        own = subprocess.run(find, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout.strip()
        self.run = folder / "run"
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("without-ray", PYTHON)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        variables = {f"SLURM_JOB_{name}": value for name, value in (("ID", "7"), ("NODELIST", "node[1-2]"))}
        variables.update(SLURM_JOB_NUM_NODES="2", FAKE_NODES=f"{own},{SECOND_NODE}", RAY_TMPDIR=temporary)
        settings = {"RUN_DIR": str(self.run), "PYTHON": python or str(programs / "without-ray")}
        settings.update(RAY_PORT=str(free_port()), START_S=str(int(COMMAND_S)))
        variables.update({f"RAYPOD_{name}": value for name, value in settings.items()})
        variables["PATH"] = os.pathsep.join([str(programs), os.environ["PATH"]])
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), str(SCRIPT.parents[1])])
        self._out = (folder / "out").open("a+")
        options: Any = {"cwd": folder, "stdout": self._out, "stderr": subprocess.STDOUT, "start_new_session": True}
        self.process = subprocess.Popen(["bash", str(SCRIPT), *flags], env={**os.environ, **variables}, **options)

    @property
    def output(self) -> str:
        return Path(self._out.name).read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                each.kill()
            self.process.kill()
            self.process.wait()
        self._out.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """`start(python, *flags)`: start the job in `tmp_path`; without a path of `python` it has no Ray."""
    shutil.copy(SUPPORT / "preemptible.py", tmp_path)
    jobs: List[Job] = []
    temporary = tempfile.mkdtemp(prefix="r")  # short: the paths of sockets are limited to 107 bytes

    def make(*flags: str) -> Job:
        jobs.append(Job(tmp_path, temporary, *flags))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def python_with_ray() -> str:
    """Return the interpreter of jobs that start real Ray nodes."""
    return sys.executable


def is_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process of a job is left, which has its folder."""
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(folder)
    return False


def test_the_script_is_valid() -> None:
    programs = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for program in programs:
        done = subprocess.run([*program, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.access(SCRIPT, os.X_OK)


def test_a_preempted_job_is_queued_again_and_completes_the_run(
    start: Callable[..., Job],
    python_with_ray: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "steady").touch()
    job = start(python_with_ray, *FLAGS)
    metrics = job.run / "metrics.jsonl"
    is_training = wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 4, COMMAND_S)
    assert is_training, job.output
    processes = psutil.Process(job.process.pid).children(recursive=True)
    job.process.send_signal(signal.SIGUSR1)  # `--signal=B:USR1@120`: to the script only
    assert job.process.wait(COMMAND_S) == CODE, job.output
    assert not psutil.wait_procs(processes, timeout=GONE_WITHIN_S)[1]
    state = run_state.read(job.run)
    assert (state.state, state.exit_code) == (run_state.PREEMPTED, CODE)
    assert 4 < state.update < UPDATES
    assert (tmp_path / "requeued").read_text() == "7\n"
    (tmp_path / "steady").unlink()
    again = start(python_with_ray, *FLAGS)
    assert again.process.wait(COMMAND_S) == 0, again.output
    assert f"from update {state.update} on" in again.output
    assert (tmp_path / "requeued").read_text() == "7\n"
    plan = json.loads((job.run / "plan.json").read_text())
    hosts = [each["host"] for each in plan["instances"]]
    assert (len(hosts), hosts[1]) == (2, SECOND_NODE)
    summary: Dict[str, Any] = json.loads((job.run / "summary.json").read_text())
    assert main(["verify-data", str(job.run)]) == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    alone = ["--fleet", "inline", "--num-instances", "1", "--replicas", str(plan["geometry"]["total_replicas"])]
    assert train.main([*FLAGS, *alone, "--run-dir", str(tmp_path / "alone")]) == 0
    reference = json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert (summary["updates"], summary["weights_sha256"]) == (UPDATES, reference["weights_sha256"])
    capsys.readouterr()


def test_a_folder_of_ray_that_other_users_can_use_ends_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with contextlib.closing(Job(tmp_path, str(folder), "")) as job:
        assert job.process.wait(COMMAND_S) == 1, job.output
        assert job.output.startswith(f"{folder} is open to other users (mode 0777)")
    assert not list(folder.iterdir())


def test_a_wrong_flag_ends_the_job_without_a_requeue(start: Any, tmp_path: Path) -> None:
    job = start("", "--batch-sice", "8")
    assert job.process.wait(COMMAND_S) == 2, job.output
    assert "unknown flag --batch-sice; did you mean --batch-size" in job.output
    assert not (tmp_path / "requeued").exists()
    assert wait_until(lambda: not [each for each in psutil.process_iter() if is_of(each, tmp_path)])


def test_a_head_that_ends_while_it_starts_is_started_once_more(start: Callable[..., Job], tmp_path: Path) -> None:
    failures = tmp_path / "failures"
    failures.write_text("1\n2\n")
    job = start("", "--batch-sice", "8")
    assert job.process.wait(COMMAND_S) == 2, job.output  # of the flag: both starts failed
    assert (job.output.count("starting it once more"), failures.read_text()) == (1, "")
