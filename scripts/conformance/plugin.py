"""The pytest plugin of a child process: excludes tests by the rules and appends each outcome to a file as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from conformance import rules, stand_ins, torch_2_0
from conformance.outcomes import EXCLUDED, FAILED, PASSED, SKIPPED

_REPORT = Path(os.environ["CONFORMANCE_REPORT"])
_FOLDER = Path(os.environ["CONFORMANCE_FOLDER"]).resolve()


def pytest_configure(config: pytest.Config) -> None:
    """Puts stand-ins for what the installed libraries lack in place, so that every file can be collected."""
    stand_ins.install()
    torch_2_0.restore()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    kept = []
    done = {event["test"] for event in map(json.loads, _REPORT.read_text().splitlines()) if event["event"] == "end"}
    for item in items:
        if _id(item.nodeid) in done:  # by an earlier process, which a test has ended
            continue
        function = item.function  # type: ignore[attr-defined]
        reason = None if _skips_itself(item) else rules.reason_of(function, _fixtures(item), _FOLDER)
        uses_benchmark = "benchmark" in item.fixturenames  # type: ignore[attr-defined]
        if uses_benchmark and not config.pluginmanager.hasplugin("pytest_benchmark.plugin"):
            reason = "the library pytest_benchmark is not installed"
        if reason is not None:
            _write(event="end", test=_id(item.nodeid), result=EXCLUDED, reason=reason)
        else:
            kept.append(item)
            _write(event="collected", test=_id(item.nodeid))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    _write(event="ready", test="")


def _skips_itself(item: pytest.Item) -> bool:
    """Whether PopTorch's own conftest skips the test: it needs hardware, or the tracer that PopTorch has removed."""
    parameters: Dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    marked = any(item.get_closest_marker(name) for name in ("skip", "ipuHardwareRequired"))
    return marked or bool(parameters.get("trace_model"))


def _fixtures(item: pytest.Item) -> List[Any]:
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]  # pytest has no public name for it
    return [found[-1].func for found in definitions.values() if found and rules.is_of_folder(found[-1].func, _FOLDER)]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="start", test=_id(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(getattr(report, "wasxfail", "") or where)
        _write(event="end", test=_id(report.nodeid), result=SKIPPED, reason=reason.replace("Skipped: ", ""))
    elif report.failed:
        _write(event="end", test=_id(report.nodeid), result=FAILED, reason=report.longreprtext)
    elif report.when == "call":
        _write(event="end", test=_id(report.nodeid), result=PASSED, reason="")


def _id(nodeid: str) -> str:
    return nodeid.split("::", 1)[-1]


def _write(**event: str) -> None:
    with _REPORT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
