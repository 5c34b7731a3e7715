"""The pytest plugin of one rank: excludes tests of GPUs and appends each outcome to the rank's file as JSON."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import List

import pytest

from conformance.outcomes import EXCLUDED, FAILED, PASSED, SKIPPED

_REPORT = Path(os.environ["CONFORMANCE_FOLDER"], f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}.jsonl")
_NEEDS_GPU = ("skip_or_fail_gpu_test(", '"No GPUs available"')  # what the source of such a test contains


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    kept = []
    for item in items:
        source = inspect.getsource(item.function)  # type: ignore[attr-defined]
        if any(part in source for part in _NEEDS_GPU):
            _write(item.nodeid, EXCLUDED, "needs a GPU")
        else:
            kept.append(item)
            _write(item.nodeid, "", "")
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        where = report.longrepr
        _write(report.nodeid, SKIPPED, str(where[2] if isinstance(where, tuple) else where).replace("Skipped: ", ""))
    elif report.failed:
        _write(report.nodeid, FAILED, report.longreprtext)
    elif report.when == "call":
        _write(report.nodeid, PASSED, "")


def _write(nodeid: str, result: str, reason: str) -> None:
    with _REPORT.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": nodeid.split("::", 1)[-1], "result": result, "reason": reason}) + "\n")
