"""The tables and lists that the conformance script prints."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Iterator, List

from conformance.expected import EXCLUDED_LIMIT, PASSED_LIMIT, Verdict
from conformance.outcomes import EXCLUDED, FAILED, PASSED, SKIPPED, Suite

_HEADER = ["collected", "skipped", "excluded", "run", "passed", "expected", "failed", "apart", "passed %"]


def report(title: str, suite: Suite, verdict: Verdict) -> Iterator[str]:
    """The lines of the table per file, the totals and the reasons of every exclusion and expected failure."""
    width = max([len(file) for file in suite] + [len("total")])
    yield f"{title}"
    yield "  ".join([" " * width, *_HEADER])
    totals: Counter[str] = Counter()
    for file in sorted(suite):
        counts = _counts(file, suite, verdict)
        totals.update(counts)
        yield _row(file.ljust(width), counts)
    yield _row("total".ljust(width), totals)
    excluded, passed = verdict.counts[EXCLUDED], verdict.counts[PASSED]
    yield ""
    yield (
        f"excluded: {excluded} of {verdict.semantic} semantic tests ({_percent(excluded, verdict.semantic)} %), "
        f"limit: at most {EXCLUDED_LIMIT:g} %"
    )
    yield (
        f"passed: {passed} of {verdict.run} semantic tests that are not excluded ({_percent(passed, verdict.run)} %), "
        f"limit: at least {PASSED_LIMIT:g} %"
    )
    yield from _grouped("Excluded", _by_reason(suite, EXCLUDED))
    yield from _grouped("Skipped by the tests themselves", _by_reason(suite, SKIPPED))
    yield from _grouped("Expected failures", _by_text(verdict.expected))
    yield from _grouped("Failures that are not semantic, counted apart", _by_text(verdict.apart))
    yield from _listed("Failures that are not listed", verdict.unlisted)
    yield from _listed("Listed tests that pass: remove them from the list", verdict.passing)
    yield from _listed("Patterns of the list that match no test", verdict.idle)
    yield from _listed("Limits of a whole run that do not hold", verdict.missed)


def _counts(file: str, suite: Suite, verdict: Verdict) -> Counter[str]:
    counts: Counter[str] = Counter()
    for outcome in suite[file]:
        counts["collected"] += 1
        name = f"{file}::{outcome.test}"
        result = "expected" if name in verdict.expected else "apart" if name in verdict.apart else outcome.result
        counts[result] += 1
        counts["run"] += outcome.result in (PASSED, FAILED) and result != "apart"
    return counts


def _row(name: str, counts: Counter[str]) -> str:
    cells = [str(counts[column]) for column in _HEADER[:-1]]
    cells.append(_percent(counts["passed"], counts["run"]) if counts["run"] else "-")
    return "  ".join([name, *(cell.rjust(len(column)) for cell, column in zip(cells, _HEADER))])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0.0"


def _by_text(reasons: Dict[str, str]) -> Dict[str, List[str]]:
    """The tests of each reason."""
    found: Dict[str, List[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(reason, []).append(name)
    return found


def _by_reason(suite: Suite, result: str) -> Dict[str, List[str]]:
    """The tests of a result, by reason; the parameters of a test are counted."""
    reasons: Dict[str, Counter[str]] = {}
    for file, outcomes in sorted(suite.items()):
        for outcome in outcomes:
            if outcome.result == result:
                reasons.setdefault(outcome.reason, Counter())[f"{file}::{outcome.test.split('[')[0]}"] += 1
    return {
        reason: [f"{name} ({n})" if n > 1 else name for name, n in tests.items()] for reason, tests in reasons.items()
    }


def _grouped(title: str, groups: Dict[str, List[str]]) -> Iterator[str]:
    if groups:
        yield ""
        yield f"{title}:"
    for reason, names in sorted(groups.items()):
        yield f"  {reason}: {', '.join(names)}"


def _listed(title: str, names: List[str]) -> Iterator[str]:
    if names:
        yield ""
        yield f"{title}:"
        yield from (f"  {name}" for name in names)
