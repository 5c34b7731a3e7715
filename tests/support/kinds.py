"""The kinds of tests: their markers, which of them run by default, and the summary of those that were left out.

A kind is the name of the folder of a test file within the folder of its package, as in `tests/runtime/workers/ray/`, or
that of a fixture that a test requests. By default pytest runs the tests without a kind, and `tests/end_to_end/`, one
real test per mechanism; `--left-out` selects the others. `--all`, an expression of `-m`, or a path on the command line
select without this rule.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Set

import pytest

KINDS: Dict[str, str] = {
    "process": "starts processes",
    "ray": "starts a Ray cluster",
    "slow": "trains for many seconds",
    "pod": "needs root; emulates host servers on this machine (scripts/pod.sh)",
    "browser": "opens pages in Chromium",
    "packages": "needs a package of an extra of its own, such as ray[tune]",
}
# Fixtures whose tests are of a kind.
FIXTURES = {
    **dict.fromkeys(("processes", "run_python", "ranks"), "process"),
    **dict.fromkeys(("session", "python_with_ray"), "ray"),
    "chromium": "browser",
}
# The commands in these have their own limits, the sum of which is above that of pyproject.toml on a busy machine.
LONG = {"ray", "slow", "pod"}
LONG_S = 900
BY_DEFAULT = "end_to_end"
COMMAND = "scripts/dev test --all"
LEFT_OUT = pytest.StashKey["Counter[str]"]()


def kinds_of(path: Path, fixtures: List[str], tests: Path) -> Set[str]:
    """Return the kinds of a test from its file and its fixtures."""
    folders = set(path.relative_to(tests).parts[1:-1])
    return (folders & set(KINDS)) | {FIXTURES[name] for name in fixtures if name in FIXTURES}


def add_markers(items: List[Any], tests: Path) -> None:
    """Mark each test with its kinds, and with the limit of its time."""
    for item in items:
        kinds = kinds_of(item.path, item.fixturenames, tests)
        for kind in kinds:
            item.add_marker(kind)
        if kinds & LONG or BY_DEFAULT in item.path.parts:
            item.add_marker(pytest.mark.timeout(LONG_S))


def choice(config: pytest.Config) -> str:
    """Return "all", "default" or "left out": the tests that the command line selects."""
    if hasattr(config, "workerinput"):  # a process of xdist, whose command line has the paths of the configuration
        return str(config.workerinput["choice"])
    if config.getoption("--left-out"):
        return "left out"
    names_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    return "all" if config.getoption("--all") or config.getoption("markexpr") or names_paths else "default"


def select(config: pytest.Config, items: List[Any]) -> None:
    """Deselect what the command line does not select, and count what does not run by default by its kind."""
    chosen = choice(config)
    if chosen == "all":
        return
    by_default: List[Any] = []
    others: List[Any] = []
    for item in items:
        kinds = [kind for kind in KINDS if item.get_closest_marker(kind)]
        is_default = not kinds or item.path.parent.name == BY_DEFAULT
        (by_default if is_default else others).append(item)
        if chosen == "default" and not is_default:
            config.stash.setdefault(LEFT_OUT, Counter())[kinds[-1]] += 1
    items[:], deselected = (by_default, others) if chosen == "default" else (others, by_default)
    config.hook.pytest_deselected(items=deselected)


def summary(left_out: Counter[str]) -> str:
    """Return the line of the terminal summary; "" if every test was selected."""
    if not left_out:
        return ""
    counts = ", ".join(f"{left_out[kind]} {kind}" for kind in KINDS if left_out[kind])
    return f"{sum(left_out.values())} tests were left out ({counts}); all: {COMMAND}"
