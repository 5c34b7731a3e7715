"""scripts/api_sweep.py: the verdict of a call in both SDKs, and the page, without a clone."""

from __future__ import annotations

from typing import Any

import api_sweep
import pytest
from conformance import api_probe

OK, OTHER = {"value": ["self", {"x": "1"}], "warned": False}, {"value": ["self", {}], "warned": False}
ERROR = {"error": ["ValueError"], "core": False, "text": "", "warned": False}
OF_CORE = {**ERROR, "core": True}


@pytest.mark.parametrize(
    ("real", "emulated", "verdict"),
    [
        (OK, OK, "same"),
        (ERROR, ERROR, "same"),
        (ERROR, {**ERROR, "error": ["TypeError"]}, "message"),
        (OK, ERROR, "message"),
        (OK, {**OTHER, "warned": True}, "message"),
        (OF_CORE, OK, "core"),
        (OK, OTHER, "silent"),
        (ERROR, OK, "silent"),
    ],
)
def test_a_verdict_is_silent_only_without_an_exception_or_a_warning(real: Any, emulated: Any, verdict: str) -> None:
    assert api_sweep.judge(real, emulated) == verdict


def test_the_page_names_the_kinds_that_differ() -> None:
    calls = [api_sweep.Call("nop()", "tensor", kind, ERROR, emulated) for kind, emulated in (("0", ERROR), ("1", OK))]
    assert "| `nop(tensor)` | 2 | 2 |  |  | `1` |" in api_sweep.page(calls)


def test_the_probe_observes_results_changes_of_state_and_errors() -> None:
    (subject,) = (each for each in api_probe.subjects() if each.name == "Options.deviceIterations")
    found: Any = {(name, kind): outcome for name, kind, outcome in api_probe.calls(subject)}
    assert found["", ""]["value"] == ["self", {"device_iterations": "2"}]
    assert found["device_iterations", "3"]["value"] == ["self", {"device_iterations": "3"}]
    assert found["device_iterations", "'x'"]["error"][0] == "AssertionError"


def test_the_committed_page_has_no_silent_entry() -> None:
    rows = [line for line in api_sweep.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows
    assert all(line.endswith("|  |") for line in rows)
