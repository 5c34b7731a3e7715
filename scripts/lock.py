"""Write constraints.txt: every package of every extra of raypod, pinned for each Python that raypod supports.

    scripts/dev lock

Needs uv (`pip install -e '.[dev]'`), which resolves pyproject.toml for Linux on x86-64, and a package index: PyPI, or
that in uv's environment variables. CHOSEN has the versions that are decided here; all others are the newest that fit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Tuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OLDEST, TORCH_28, NEWEST = ("3.8",), ("3.9",), ("3.10", "3.11", "3.12", "3.13")
CHOSEN: Dict[Tuple[str, ...], List[str]] = {
    OLDEST: ["torch==2.0.1", "torchvision==0.15.2", "ray==2.10.0"],  # of the Poplar SDK 3.3/3.4
    TORCH_28: ["torch==2.8.0", "torchvision==0.23.0"],  # the last for Python 3.9
    NEWEST: ["torch==2.13.0", "torchvision==0.28.0"],
}
PYTHONS = sum(CHOSEN, ())
_PLATFORM = "x86_64-manylinux_2_31"
# What only torch's wheels with CUDA need. Those for the CPU, which raypod wants, do not.
_OF_CUDA = re.compile(r"(nvidia|cuda|triton)\b")
_HEADER = """\
# Written by `scripts/dev lock`: the versions that raypod is tested with, of all packages of all extras. So a release of
# another package changes nothing here. "Newest" is Python 3.10 to 3.13, "oldest" 3.8, that of the Poplar SDK 3.3/3.4
# host. Without them pip may install a torch and a torchvision that do not match. What only torch's wheels with
# CUDA need is not listed.
"""


def main() -> None:
    """Resolve for each Python, and write the file."""
    found = {python: resolved(python, chosen) for pythons, chosen in CHOSEN.items() for python in pythons}
    (ROOT / "constraints.txt").write_text(_HEADER + "".join(f"{line}\n" for line in merged(found)))


def resolved(python: str, chosen: List[str]) -> Dict[str, str]:
    """Return the versions of all packages for a version of Python, by name."""
    with tempfile.TemporaryDirectory() as temporary:
        fixed = Path(temporary, "chosen.txt")
        fixed.write_text("\n".join(chosen))
        command = ["uv", "pip", "compile", "--quiet", "--all-extras", "--python-version", python]
        command += ["--python-platform", _PLATFORM, "--no-annotate", "--no-header", "--constraints", str(fixed)]
        done = subprocess.run(
            [*command, "pyproject.toml"], cwd=str(ROOT), stdout=subprocess.PIPE, check=False, text=True
        )
    if done.returncode:
        sys.exit(f"lock: uv found no versions for Python {python}")
    versions = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in done.stdout.splitlines())):
        if not line.startswith("-"):
            pinned = Requirement(line)
            name = canonicalize_name(pinned.name)
            if not _OF_CUDA.match(name):
                versions[name] = str(pinned.specifier)[len("==") :].partition("+")[0]  # without +cpu
    return versions


def merged(found: Dict[str, Dict[str, str]]) -> List[str]:
    """Return one line per package and version, with a marker if other Pythons have another version or none."""
    lines = []
    for name in sorted({name for versions in found.values() for name in versions}):
        by_version: Dict[str, List[str]] = {}
        for python in PYTHONS:
            if name in found[python]:
                by_version.setdefault(found[python][name], []).append(python)
        lines += [f"{name}=={version}{marker(pythons)}" for version, pythons in by_version.items()]
    return lines


def marker(pythons: List[str]) -> str:
    """Return the environment marker of versions of Python: "" for all that raypod supports."""
    first, last = PYTHONS.index(pythons[0]), PYTHONS.index(pythons[-1])
    if list(PYTHONS[first : last + 1]) != pythons:
        return " ; " + " or ".join(f'python_version == "{python}"' for python in pythons)
    if len(pythons) == 1 and 0 < first < len(PYTHONS) - 1:
        return f' ; python_version == "{pythons[0]}"'
    bounds = [f'python_version >= "{pythons[0]}"'] if first else []
    bounds += [f'python_version < "{PYTHONS[last + 1]}"'] if last < len(PYTHONS) - 1 else []
    return f" ; {' and '.join(bounds)}" if bounds else ""


if __name__ == "__main__":
    main()
