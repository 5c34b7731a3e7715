"""One-line summaries of exceptions."""

from __future__ import annotations

from raypod.fleet.ray_watch import summarize_exception


def test_an_exception_of_a_loader_worker_is_summarized_without_its_traceback() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    assert summarize_exception(ValueError(f"{text}ValueError: no sample 7\n")) == (
        "ValueError: no sample 7 (in DataLoader worker process 0)"
    )
    assert summarize_exception(ValueError("no sample 7")) == "ValueError: no sample 7"
