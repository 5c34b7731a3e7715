"""Runs the tests of poptorch-experimental-addons and bess-kge, which need the custom operators of the former.

They need Python 3.8 to 3.10 (their loader reads a variable of `sysconfig` that 3.11 has removed), einops, and bess-kge
also ogb and pandas. Each row is one file, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Dict, List

from conformance.clone import extract
from conformance.outcomes import FAILED, PASSED, SKIPPED, Outcome, RunOptions, Suite

_SDK = Path(__file__).resolve().parents[2] / "raypod" / "emulated_sdk"
_ADDONS, _BESS = "poptorch_experimental_addons", "besskge"
# The compiled operators of each package, which looks for the file in its folder `build` before it loads it.
LIBRARIES = {_ADDONS: "libpoptorch_experimental_addons.so", _BESS: "besskge_custom_ops.so"}


def run_addons(git_dir: Path, folder: Path, options: RunOptions) -> Suite:
    """The outcomes of the tests of poptorch-experimental-addons by file, run in `folder`, which the caller deletes."""
    return _run(_ADDONS, git_dir, folder, [], options)


def run_bess(addons: Path, git_dir: Path, folder: Path, options: RunOptions) -> Suite:
    """The outcomes of the tests of bess-kge, which imports the clone `addons` of poptorch-experimental-addons."""
    others = folder / "addons"
    _extract(_ADDONS, addons, others)
    return _run(_BESS, git_dir, folder, [others], options)


def _extract(package: str, git_dir: Path, folder: Path) -> None:
    extract(git_dir, [package, "tests"], folder)
    (folder / "build").mkdir()
    (folder / "build" / LIBRARIES[package]).touch()
    (folder / "pytest.ini").write_text("[pytest]\n")


def _run(package: str, git_dir: Path, folder: Path, others: List[Path], options: RunOptions) -> Suite:
    _extract(package, git_dir, folder)
    paths = [_SDK.parent / "host" / "startup", _SDK, folder, *others]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "EMULATED_POD_CUSTOM_OPS": "poptorch.custom_operators.research",
        "EMULATED_POD_IPUS": "16",
        "OMP_NUM_THREADS": "1",
    }
    files = sorted(path.name for path in (folder / "tests").glob("test_*.py"))
    return {
        f"{package} {name}": _outcomes(name, folder, environment, options) for name in files if options.only in name
    }


def _outcomes(name: str, folder: Path, environment: Dict[str, str], options: RunOptions) -> List[Outcome]:
    """The outcomes of one file; a file that does not end in time is one failure."""
    report = folder / f"{name}.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", f"tests/{name}"]
    words += ["-k", options.keyword] if options.keyword else []
    try:
        ended = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=options.limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return [Outcome("(file)", FAILED, f"not finished within {options.limit_s:g} s")]
    if not report.exists():
        return [Outcome("(collection)", FAILED, ended.stdout + ended.stderr)]
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    for kind, result in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        found = case.find(kind)
        if found is not None:
            return Outcome(case.get("name", ""), result, found.text or found.get("message", ""))
    return Outcome(case.get("name", ""), PASSED)
