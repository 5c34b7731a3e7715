"""Runs the files of PopTorch's tests in child processes and reads their outcomes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List

from conformance.clone import extract
from conformance.forks import Forks
from conformance.outcomes import EXCLUDED, FAILED, Outcome, RunOptions, Suite

_INTERRUPTED = 2  # pytest's status after an error while it collects, and after a KeyboardInterrupt
_SCRIPTS = Path(__file__).resolve().parents[1]
SDK = _SCRIPTS.parent / "raypod" / "emulated_sdk"
# What PopTorch's tests import besides the packages of raypod; requirements.txt has those that `pip` installs anywhere.
LIBRARIES = ("expecttest", "nbconvert", "nbformat", "torch_cluster", "torch_geometric", "torch_scatter", "torch_sparse")
LIBRARIES += ("torch_spline_conv", "transformers")


def run(git_dir: Path, folder: Path, options: RunOptions) -> Suite:
    """The outcomes of PopTorch's tests per file, run in `folder`, which the caller deletes."""
    extract(git_dir, ["tests", "poptorch_geometric/python"], folder)
    (folder / "packages").mkdir()
    (folder / "poptorch_geometric" / "python").rename(folder / "packages" / "poptorch_geometric")
    (folder / "pytest.ini").write_text("[pytest]\n")
    _write_libraries(folder / "tests")
    found = {*(folder / "tests").rglob("*_test.py"), *(folder / "tests").rglob("test_*.py")}
    names = sorted(str(path.relative_to(folder / "tests")) for path in found)
    names = [name for name in names if options.only in name]
    waiting = names[::-1]
    suite: Suite = {}

    def work(forks: Forks) -> None:
        while waiting:
            name = waiting.pop()
            suite[name] = _outcomes(name, folder, options, forks)
            print(f"{name}: {len(suite[name])} tests", file=sys.stderr)

    processes = [Forks(folder, child_environment(folder)) for _ in range(min(options.jobs, len(names)))]
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for worker in [pool.submit(work, forks) for forks in processes]:
                worker.result()
        finally:  # before the threads are joined: they wait for the processes
            waiting.clear()
            for forks in processes:
                forks.close()
    return suite


def child_environment(folder: Path) -> Dict[str, str]:
    """The environment of a child: the emulated SDK first, and nothing is written outside of `folder`."""
    private = folder / "home"
    private.mkdir(exist_ok=True)
    python = private / "python3"  # tests that start a program name the interpreter so
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # The startup folder makes torchvision importable with a CPU-only torch.
    paths = [str(SDK), str(SDK.parent / "host" / "startup"), str(folder / "packages"), str(_SCRIPTS)]
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("POPTORCH_")},
        "PATH": os.pathsep.join([str(private), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(private),
        "TMPDIR": str(private),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # since torch 2.6, `torch.load` rejects whole models by default
    }


def _write_libraries(tests: Path) -> None:
    """Creates an empty library for each custom operator of the tests, which stop at their import without it."""
    for source in (tests / "custom_ops").glob("*.cpp"):
        source.with_name(f"lib{source.stem}.so").touch()


def _outcomes(name: str, folder: Path, options: RunOptions, forks: Forks) -> List[Outcome]:
    """The outcomes of one file; a test that ends the process is a failure, and the tests after it run in a new one."""
    report = folder / (name.replace("/", "__") + ".jsonl")
    report.touch()
    log = report.with_suffix(".log")
    log.touch()
    arguments = ["-q", "--tb=short", "-c", str(folder / "pytest.ini"), "--extended-tests", "-p", "conformance.plugin"]
    if importlib.util.find_spec("pytest_benchmark") is not None:
        arguments += ["-p", "pytest_benchmark.plugin"]
    arguments += ["-p", "no:cacheprovider", f"tests/{name}", *(["-k", options.keyword] if options.keyword else [])]
    environment = {"CONFORMANCE_REPORT": str(report), "CONFORMANCE_FOLDER": str(folder / "tests")}
    deadline = time.monotonic() + options.limit_s
    while True:
        status = forks.run(arguments, environment, log, deadline - time.monotonic())
        output = log.read_text(encoding="utf-8", errors="replace")
        progress = _Progress.read(report)
        outcomes = list(progress.outcomes.values())
        if status is None:
            reason = f"not finished within {options.limit_s:g} s"
            return [*outcomes, *(Outcome(test, FAILED, reason) for test in progress.waiting or ["(collection)"])]
        if not progress.is_collected:
            return [*outcomes, _collection_outcome(output)]
        if not progress.waiting:
            interrupted = [_collection_outcome(output)] if status == _INTERRUPTED else []
            return [*outcomes, *interrupted]
        test = progress.started if progress.started in progress.waiting else progress.waiting[0]
        event = {"event": "end", "test": test, "result": FAILED, "reason": f"the process ended: {status}\n{output}"}
        with report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def _collection_outcome(output: str) -> Outcome:
    """The outcome of a file that pytest cannot import; only a missing library of LIBRARIES excludes it."""
    missing = re.findall(r"ModuleNotFoundError: No module named '(\w+)", output)
    if missing and missing[-1] in LIBRARIES and importlib.util.find_spec(missing[-1]) is None:
        return Outcome("(file)", EXCLUDED, f"the library {missing[-1]} is not installed")
    return Outcome("(collection)", FAILED, output)


class _Progress:
    """What the children of one file have reported."""

    def __init__(self) -> None:
        self.outcomes: Dict[str, Outcome] = {}
        self.started = ""  # the test that started last
        self.is_collected = False
        self._collected: Dict[str, None] = {}

    @classmethod
    def read(cls, report: Path) -> _Progress:
        progress = cls()
        for line in report.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            progress._add(event["event"], event["test"], event)
        return progress

    @property
    def waiting(self) -> List[str]:
        """The collected tests without an outcome."""
        return [test for test in self._collected if test not in self.outcomes]

    def _add(self, event: str, test: str, details: Dict[str, str]) -> None:
        if event == "ready":
            self.is_collected = True
        elif event == "collected":
            self._collected[test] = None
        elif event == "start":
            self.started = test
        elif test not in self.outcomes or self.outcomes[test].result != FAILED:  # a failed test may still tear down
            self.outcomes[test] = Outcome(test, details["result"], details["reason"])
