"""The warnings of an instance are collected, each once, and shown as before."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Iterator

import pytest

from raypod.runtime.worker.process import WarningRecord

SDK = logging.getLogger("poptorch::python")


@pytest.fixture
def record() -> Iterator[WarningRecord]:
    """An installed record, of which nothing remains afterwards."""
    filters = list(SDK.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *_, **__: None
        found = WarningRecord()
        found.install()
        yield found
    SDK.filters[:] = filters


def warn(text: str, category: Any = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=1)


def test_each_warning_is_taken_once_with_its_place(record: WarningRecord) -> None:
    for category in (DeprecationWarning, FutureWarning, ResourceWarning):  # about future versions
        warn("old", category)
    for text in ("two\n  lines", "two lines", "other"):
        warn(text)
    first, other = record.take()
    assert first.startswith("UserWarning: two lines (test_warning_record.py:")
    assert first.endswith(", in warn)")
    assert other.startswith("UserWarning: other (")
    warn("other")
    assert record.take() == ()


def test_warnings_of_python_and_of_the_sdk_are_still_shown(
    record: WarningRecord, caplog: pytest.LogCaptureFixture
) -> None:
    shown = []
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        WarningRecord().install()
        warn("shown")
    with caplog.at_level(logging.INFO, SDK.name):
        SDK.warning("Unsupported ops: %s", "[aten::huber_loss]")
        SDK.info("compiled")
    assert shown == ["shown"]
    assert caplog.messages == ["Unsupported ops: [aten::huber_loss]", "compiled"]
    assert record.take() == ("Unsupported ops: [aten::huber_loss]",)


def test_their_number_and_length_are_limited(record: WarningRecord) -> None:
    for number in range(20):
        warn(f"{number} {'x' * 1000}")
    taken = record.take()
    assert len(taken) == 10
    assert all(len(text) < 600 for text in taken)
