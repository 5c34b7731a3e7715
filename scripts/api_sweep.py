#!/usr/bin/env python3
"""Compares what the emulated SDK and PopTorch's own Python package do with every kind of value of every argument.

    HOROVOD_PYTHON=python scripts/api_sweep.py GIT_DIR [--only TEXT] [--show] [--write]

GIT_DIR is a clone of graphcore/poptorch, bare or not. Its folder `python/` runs unchanged, over a core that replays its
graphs on the CPU (`conformance/front_end/`), and is the judge; with Python 3.8 and torch 2.0.1. Every call is made in
both (`conformance/api_probe.py`, `names_probe.py`, `loader_probe.py`). The judge of `horovod.torch` is a real Horovod
on two ranks, of the interpreter that HOROVOD_PYTHON names (`horovod_probe.py`):

    same       both accept the value, with the same result and the same change of the state; or both reject it
    message    the emulated SDK raises an exception or warns where PopTorch does not
    core       PopTorch passes the value on to its compiled core, which is not public or not part of the stand-in
    silent     the emulated SDK accepts the value with another result, or one that PopTorch rejects

`--write` writes docs/reference/api-sweep.md. The status is 1 if a call is silent, 2 for a mistake in the command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

import torch  # noqa: E402  # after the path is set
from conformance import front_end_runs  # noqa: E402  # as above
from conformance.clone import CloneError  # noqa: E402  # as above
from conformance.command import exit_with, refuse  # noqa: E402  # as above

PAGE = ROOT / "docs" / "reference" / "api-sweep.md"
SAME, MESSAGE, CORE, SILENT = "same", "message", "core", "silent"
_PROBES, _HOROVOD = ("api_probe", "names_probe", "loader_probe"), "horovod_probe"
_LIMIT_S = 1800.0

Outcome = Dict[str, Any]


class Call(NamedTuple):
    """One call in both SDKs."""

    name: str
    parameter: str
    kind: str
    real: Outcome
    emulated: Outcome

    @property
    def verdict(self) -> str:
        """`same`, `message`, `core` or `silent`."""
        return judge(self.real, self.emulated)


def judge(real: Outcome, emulated: Outcome) -> str:
    """Compare the outcomes of a call."""
    if "error" in emulated:
        if "error" not in real:
            return MESSAGE
        return SAME if set(real["error"]) & set(emulated["error"]) else MESSAGE
    if "error" in real and real["core"]:
        return CORE
    if "error" not in real and real["value"] == emulated["value"]:
        return SAME
    return MESSAGE if emulated["warned"] else SILENT


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Compare every argument of PopTorch with the emulated SDK.")
    parser.add_argument("git_dir", metavar="GIT_DIR", type=Path, help="a clone of graphcore/poptorch, bare or not")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="call what has TEXT in its name")
    parser.add_argument("--show", action="store_true", help="print both outcomes of calls that differ")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    if torch.__version__.split("+")[0] != front_end_runs.TORCH:
        return refuse(f"this PopTorch needs torch {front_end_runs.TORCH}, found {torch.__version__}")
    if args.write and args.only:
        return refuse("--write needs all calls: leave --only out")
    horovod = os.environ.get("HOROVOD_PYTHON", "")
    if not horovod:
        return refuse("HOROVOD_PYTHON has to name the interpreter of a real Horovod: see scripts/install_horovod.sh")
    with tempfile.TemporaryDirectory(prefix="api-sweep-") as folder:
        try:
            front_end_runs.prepare(args.git_dir, Path(folder))
        except CloneError as error:
            return refuse(str(error))
        calls = run(Path(folder), args.only, horovod)
    if not calls:
        return refuse(f"--only {' '.join(args.only)}: no such name")
    for call in calls:
        if call.verdict == SILENT or (args.show and call.verdict == MESSAGE):
            print(f"{call.verdict}: {call.name}({call.parameter}={call.kind})\n  PopTorch: {call.real}")
            print(f"  emulated: {call.emulated}")
    counts = Counter(call.verdict for call in calls)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in (SAME, MESSAGE, CORE, SILENT)))
    if args.write:
        PAGE.write_text(page(calls))
    return 1 if counts[SILENT] else 0


_NEW_FOLDER = "NEW_FOLDER"  # in a command, which may be started again


class _Side(NamedTuple):
    """How a probe is started with one of the SDKs."""

    command: List[str]
    paths: List[Path]
    variables: Dict[str, str]


def run(folder: Path, only: List[str], horovod: str) -> List[Call]:
    """Make the calls in both SDKs, at the same time; `horovod`: the interpreter that has the real Horovod."""
    (folder / "state").mkdir()
    front_end = {"FRONT_END_SOURCES": str(folder), "FRONT_END_FOLDER": str(folder / "state")}
    own = [sys.executable]
    real = _Side(own, [folder / "packages"], front_end)
    emulated = _Side(own, [ROOT / "raypod" / "emulated_sdk"], {})
    calls = [call for probe in _PROBES for call in _compared(probe, real, emulated, folder, only)]
    launch = ["-m", "raypod.launch", "--num-replicas", "2", "--num-instances", "2", "--run-dir"]
    real = _Side([horovod, *launch, _NEW_FOLDER, horovod], [ROOT], {})
    emulated = _Side([*own, *launch, _NEW_FOLDER, *own], [ROOT], {"EMULATED_POD_HOROVOD": "emulated"})
    return calls + _compared(_HOROVOD, real, emulated, folder, only)


def _compared(probe: str, real: _Side, emulated: _Side, folder: Path, only: List[str]) -> List[Call]:
    sides = {name: (side, folder / f"{probe}-{name}") for name, side in (("real", real), ("emulated", emulated))}
    processes = {name: _started(probe, side, output, only) for name, (side, output) in sides.items()}
    found = [_outcomes(probe, *sides[name], processes[name], only) for name in sides]
    keys = dict.fromkeys([*found[0], *found[1]])
    absent: Outcome = {"error": ["absent"], "core": False, "text": "", "warned": False}
    return [Call(*key, found[0].get(key, absent), found[1].get(key, absent)) for key in keys]


_ENDED: Outcome = {"error": ["the process ended"], "core": False, "text": "", "warned": False}


def _outcomes(
    probe: str, side: _Side, output: Path, process: subprocess.Popen[bytes], only: List[str]
) -> Dict[Tuple[str, str, str], Outcome]:
    """The outcomes by name, parameter and kind. A probe that a call has ended is started again, behind that call."""
    before = -1
    while True:
        status = process.wait(_LIMIT_S)
        path = output.with_suffix(".jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        begun = sum(line[3] is None for line in lines)
        if status == 0:
            return {(name, parameter, kind): outcome or _ENDED for name, parameter, kind, outcome in lines}
        if begun <= before or not begun:
            sys.exit(f"{probe} ended with {status}: {output.with_suffix('.log').read_text()[-2000:]}")
        before = begun
        process = _started(probe, side, output, only, begun)


def _started(probe: str, side: _Side, output: Path, only: List[str], first: int = 0) -> subprocess.Popen[bytes]:
    hidden = ("POPTORCH_", "POPDIST_", "EMULATED_POD_", "FRONT_END_", "HOROVOD_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    with output.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [
                *(f"{output}-{first}" if part == _NEW_FOLDER else part for part in side.command),
                "-m",
                f"conformance.{probe}",
                *only,
            ],
            stdout=log,
            stderr=log,
            env={
                **own,
                "PYTHONPATH": os.pathsep.join(map(str, [*side.paths, ROOT / "scripts"])),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PROBE_OUTPUT": str(output.with_suffix(".jsonl")),
                "PROBE_FROM": str(first),
                **side.variables,
            },
        )


_HEAD = """<!-- Written by scripts/api_sweep.py; do not edit. -->

# Every argument of PopTorch and Horovod

What the emulated SDK does with each kind of value of each argument, compared with PopTorch's own Python package and a
real Horovod 0.28.1, which are the judges: `HOROVOD_PYTHON=PYTHON scripts/api_sweep.py GIT_DIR --write` makes {count:,}
calls in both, with Python 3.8 and torch 2.0.1. In a row, the values that are not listed have the same effect in both:
accepted with the same result and the same change of the state, or rejected by an exception of the same class.

- **rejected**: how many of the kinds of values the judge rejects.
- **message**: the emulated SDK raises an exception of another class, or raises or warns where the judge is silent, for
  example about a value that PopTorch's compiled core rejects later.
- **core**: PopTorch passes the value on to its compiled core, which the comparison does not have.
- **other**: the emulated SDK silently does something else. No row has an entry here.

Data loaders load two epochs, of 9 samples in calls of 4, with and without worker processes, in all modes, and as a
process of two, which shuffles, too; a shuffled asynchronous epoch is not abandoned, as the next order depends on time
in PopTorch. `horovod.torch` is called on two ranks, which make the same calls with tensors of their own; not called
is what depends on the hardware or measures time, what makes the ranks wait for each other, as a `name` whose text
differs between them, and what ends the process with the real Horovod: a 0-d tensor or one number for `splits` of
`alltoall`, invalid ranks of a process set. PopDist is not public: the judge of its options is the stand-in of the same
scripts.

| argument | kinds | rejected | message | core | other |
|---|---|---|---|---|---|
"""


def page(calls: List[Call]) -> str:
    """Return the page of the reference: a row per argument."""
    rows: Dict[Tuple[str, str], List[Call]] = {}
    for call in calls:
        rows.setdefault((call.name, call.parameter), []).append(call)
    lines = []
    for (name, parameter), row in rows.items():
        shown = name[:-2] if name.endswith("()") else name
        cells = [_kinds(row, verdict) for verdict in (MESSAGE, CORE, SILENT)]
        rejected = sum("error" in call.real for call in row)
        lines.append(f"| `{shown}({parameter})` | {len(row)} | {rejected} | {' | '.join(cells)} |")
    return _HEAD.format(count=len(calls)) + "\n".join(lines) + "\n"


def _kinds(row: List[Call], verdict: str) -> str:
    kinds = [call.kind or "valid arguments" for call in row if call.verdict == verdict]
    if len(kinds) > 6:
        return f"{len(kinds)} kinds, such as {', '.join(f'`{kind}`' for kind in kinds[:3])}"
    return ", ".join(f"`{kind}`" for kind in kinds)


if __name__ == "__main__":
    exit_with(main)
