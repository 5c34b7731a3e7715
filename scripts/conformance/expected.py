"""Judges outcomes against a list of expected failures, a YAML file of patterns with one reason each.

An entry: `tests`, one pattern or several on "file::test", in which `*` stands for any text; `reason`; optionally
`where`, requirements such as "torch<2.1" or "not torch_cluster" that all have to hold for the entry to count; and
`semantic: false` for tests whose failure says nothing about what the SDK does for a program: they check a file of the
compiler, a log line, a private attribute, a message of pytest or a time. Those are counted apart.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, List

import yaml
from packaging.requirements import Requirement

from conformance.outcomes import EXCLUDED, FAILED, PASSED, SKIPPED, Suite

PASSED_LIMIT, EXCLUDED_LIMIT = 99.0, 15.0  # percent: at least, of `run`; at most, of what is not skipped


class ListError(Exception):
    """The list of expected failures is malformed."""


@dataclass
class Entry:
    """One reason, and the tests that fail for it."""

    patterns: List[str]
    reason: str
    is_semantic: bool = True

    def matches(self, name: str) -> bool:
        return any(_matches(pattern, name) for pattern in self.patterns)


@dataclass
class Verdict:
    """The comparison of a suite with the list; `unlisted`, `passing`, `idle` and `missed` make the run fail."""

    counts: Counter[str]  # tests by result
    expected: Dict[str, str] = field(default_factory=dict)  # test: the reason
    apart: Dict[str, str] = field(default_factory=dict)  # as `expected`, of tests that are not semantic
    unlisted: List[str] = field(default_factory=list)
    passing: List[str] = field(default_factory=list)
    idle: List[str] = field(default_factory=list)  # patterns without a test
    missed: List[str] = field(default_factory=list)  # limits of a whole run

    @property
    def good(self) -> bool:
        return not (self.unlisted or self.passing or self.idle or self.missed)

    @property
    def run(self) -> int:
        """The semantic tests that are neither excluded nor skipped."""
        return self.counts[PASSED] + self.counts[FAILED] - len(self.apart)

    @property
    def semantic(self) -> int:
        """The semantic tests that are not skipped."""
        return sum(self.counts.values()) - self.counts[SKIPPED] - len(self.apart)


def read_list(path: Path) -> List[Entry]:
    """The entries of the list that count in this environment."""
    entries = []
    for raw in yaml.safe_load(path.read_text(encoding="utf-8")) or []:
        if not isinstance(raw, dict) or not {"tests", "reason"} <= set(raw) <= {"tests", "reason", "where", "semantic"}:
            raise ListError(f"{path.name}: an entry has `tests`, `reason` and optionally `where`, `semantic`: {raw}")
        if all(_holds(requirement) for requirement in _as_list(raw.get("where", []))):
            entries.append(Entry(_as_list(raw["tests"]), str(raw["reason"]), bool(raw.get("semantic", True))))
    return entries


def judge(suite: Suite, entries: List[Entry], *, whole: bool) -> Verdict:
    """Compares the outcomes with the list; `whole`: every pattern has to match a test, and the two limits hold."""
    verdict = Verdict(Counter(outcome.result for tests in suite.values() for outcome in tests))
    outcomes = {f"{file}::{outcome.test}": outcome for file, tests in suite.items() for outcome in tests}
    for name, outcome in outcomes.items():
        entry = next((entry for entry in entries if entry.matches(name)), None)
        if outcome.result == FAILED and entry is None:
            verdict.unlisted.append(name)
        elif outcome.result == FAILED and entry is not None:
            (verdict.expected if entry.is_semantic else verdict.apart)[name] = entry.reason
        elif outcome.result == PASSED and entry is not None:
            verdict.passing.append(name)
    if whole:
        ran = [name for name, outcome in outcomes.items() if outcome.result in (FAILED, PASSED)]
        patterns = [pattern for entry in entries for pattern in entry.patterns]
        verdict.idle = [pattern for pattern in patterns if not any(_matches(pattern, name) for name in ran)]
        if 100 * verdict.counts[PASSED] < PASSED_LIMIT * verdict.run:
            verdict.missed.append(f"less than {PASSED_LIMIT:g} % passed")
        if 100 * verdict.counts[EXCLUDED] > EXCLUDED_LIMIT * verdict.semantic:
            verdict.missed.append(f"more than {EXCLUDED_LIMIT:g} % are excluded")
    return verdict


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL) is not None


def _holds(text: str) -> bool:
    """Whether an installed package satisfies a requirement.

    "NAME" holds for one that can be imported, whatever its distribution is called; "not NAME" for one that cannot.
    """
    if text.startswith("not "):
        return importlib.util.find_spec(text[len("not ") :]) is None
    requirement = Requirement(text)
    if not requirement.specifier:
        return importlib.util.find_spec(requirement.name) is not None
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _as_list(value: Any) -> List[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]
