"""Runs Horovod's PyTorch tests with several instances, against the emulated Horovod and, as a control, a real one.

Each row is one `raypod.launch`, whose instances all run the whole file: the tests need the same order on every rank.
HOROVOD_PYTHON names the interpreter that has the real Horovod.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, List

from conformance import process_group
from conformance.clone import extract
from conformance.outcomes import FAILED, PASSED, Outcome, RunOptions, Suite

_RELEASE = "v0.28.1"  # the release that the emulated Horovod follows
_FILE = "test_torch.py"
_SCRIPTS = Path(__file__).resolve().parents[1]
_WAIT_S = "60"  # of a rank for the others, so that a hang costs one test only
_GRACE_S = 30.0  # of the launcher, which ends its instances

# What the tests take from Horovod's test/utils/common.py, which needs Horovod's launcher.
_COMMON = """
import contextlib, os, tempfile

def mpi_env_rank_and_size():
    return int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])

def skip_or_fail_gpu_test(test, message):
    test.skipTest(message)

@contextlib.contextmanager
def temppath():
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")
"""


def run(git_dir: Path, folder: Path, options: RunOptions) -> Suite:
    """The outcomes of the tests by row, run in `folder`, which the caller deletes."""
    extract(git_dir, ["test/parallel"], folder, commit=_RELEASE)
    pythons = {"emulated": sys.executable}
    if os.environ.get("HOROVOD_PYTHON"):
        pythons["real"] = os.environ["HOROVOD_PYTHON"]
    else:
        print("Horovod: no control, HOROVOD_PYTHON does not name the interpreter of a real Horovod")
    suite: Suite = {}
    for instances in (2, 4):
        for which, python in pythons.items():
            row = f"horovod {_FILE}, {instances} instances, {which}"
            if options.only in row:
                place = folder / f"{which}-{instances}"
                place.mkdir()
                (place / _FILE).write_bytes((folder / "test" / "parallel" / _FILE).read_bytes())
                (place / "common.py").write_text(_COMMON)
                (place / "pytest.ini").write_text("[pytest]\n")
                suite[row] = _run_row(place, python, instances, which, options)
    return suite


def _run_row(place: Path, python: str, instances: int, which: str, options: RunOptions) -> List[Outcome]:
    """The outcomes of one launch."""
    tests = [python, "-m", "pytest", "-q", "--tb=short", "-p", "conformance.rank_plugin", "-p", "no:cacheprovider"]
    tests += [_FILE, *(["-k", options.keyword] if options.keyword else [])]
    count = ["--num-replicas", str(instances), "--num-instances", str(instances)]
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("HOROVOD_", "EMULATED_POD_"))},
        "PYTHONPATH": os.pathsep.join([str(_SCRIPTS.parent), str(_SCRIPTS)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "EMULATED_POD_TIMEOUT_S": _WAIT_S,
        "CONFORMANCE_FOLDER": str(place),
    }
    if which == "emulated":
        environment["EMULATED_POD_HOROVOD"] = "emulated"
    command = [python, "-m", "raypod.launch", *count, "--run-dir", str(place / "run"), *tests]
    with (place / "output").open("wb") as output:
        launch = subprocess.Popen(
            command, cwd=place, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            end = f"the launch ended with {launch.wait(options.limit_s)}"
        except subprocess.TimeoutExpired:
            end = f"not finished within {options.limit_s:g} s"
        finally:
            process_group.end(launch, _GRACE_S)
    ranks = [_read(place / f"rank-{rank}.jsonl") for rank in range(instances)]
    names = list(dict.fromkeys(name for rank in ranks for name in rank))
    if not names:
        return [Outcome("(collection)", FAILED, f"{end}\n{(place / 'output').read_text(errors='replace')}")]
    return [combined(name, [rank.get(name) for rank in ranks], end) for name in names]


def _read(report: Path) -> Dict[str, Outcome]:
    """The outcomes of one rank. A test that has begun only, or not at all, has no result."""
    outcomes: Dict[str, Outcome] = {}
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        outcome = Outcome(**json.loads(line))
        known = outcomes.get(outcome.test)
        if known is None or known.result != FAILED:  # a failed test may still tear down
            outcomes[outcome.test] = outcome
    return outcomes


def combined(name: str, ranks: List[Outcome | None], end: str) -> Outcome:
    """The outcome of a test, which passes if it passes on every rank; otherwise the first one that did not pass."""
    for rank, outcome in enumerate(ranks):
        if outcome is None or not outcome.result:
            return Outcome(name, FAILED, f"rank {rank} has not finished it: {end}")
        if outcome.result == FAILED:
            return Outcome(name, FAILED, f"rank {rank}: {outcome.reason}")
    known = [outcome for outcome in ranks if outcome is not None]
    return next((outcome for outcome in known if outcome.result != PASSED), known[0])
