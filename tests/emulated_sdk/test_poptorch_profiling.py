"""`profiling.Channel`: spans, recorded if PVTI_OPTIONS enables them."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

import poptorch
import pytest
import torch

from tests.support.poptorch_models import options


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    reports = tmp_path / "reports"
    monkeypatch.setenv("PVTI_OPTIONS", json.dumps({"enable": "true", "directory": str(reports)}))
    return reports


def spans(folder: Path) -> List[Dict[str, Any]]:
    return json.loads((folder / f"poptorch-{os.getpid()}.trace.json").read_text() + "]")


class Program:
    def step(self, number: int) -> int:
        return number + 1


def test_a_tracepoint_records_a_span(folder):
    with poptorch.profiling.Channel("app").tracepoint("load"):
        time.sleep(0.01)
    with pytest.raises(KeyError), poptorch.profiling.Channel("app").tracepoint("fails"):
        raise KeyError
    span, failed = spans(folder)
    assert failed["name"] == "fails"
    assert (span["name"], span["cat"], span["ph"], span["pid"]) == ("load", "app", "X", os.getpid())
    assert span["dur"] >= 1e4  # microseconds


def test_instrumented_methods_record_spans_and_return_their_results(folder):
    program = Program()
    poptorch.profiling.Channel("app").instrument(program, "step")
    assert [program.step(number) for number in range(3)] == [1, 2, 3]
    assert [span["name"] for span in spans(folder)] == ["step"] * 3


def test_threads_write_concurrently(folder):
    def work(name: str) -> None:
        channel = poptorch.profiling.Channel(name)
        for _ in range(20):
            with channel.tracepoint("span"):
                pass

    names = [f"channel {index}" for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, names))
    assert sorted(span["cat"] for span in spans(folder)) == sorted(names * 20)


@pytest.mark.parametrize("text", ["", "{}", '{"enable": "false"}'])
def test_nothing_is_recorded_by_default(monkeypatch, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PVTI_OPTIONS", text)
    program = Program()
    channel = poptorch.profiling.Channel("app")
    assert channel.instrument(program, "step") is program
    with channel.tracepoint("block"):
        assert program.step(1) == 2
    assert not list(tmp_path.iterdir())
    assert "step" not in vars(program)


@pytest.mark.parametrize("text", ["enable", "[]"])
def test_pvti_options_must_be_a_json_object_and_methods_exist(monkeypatch, text):
    monkeypatch.delenv("PVTI_OPTIONS", raising=False)
    with pytest.raises(AttributeError, match="walk"):
        poptorch.profiling.Channel("app").instrument(Program(), "walk")
    monkeypatch.setenv("PVTI_OPTIONS", text)
    with pytest.raises(poptorch.Error, match="PVTI_OPTIONS"):
        poptorch.profiling.Channel("app")


def test_an_executor_records_its_compilation_and_execution(folder):
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), options())
    model(torch.ones(1, 1))
    model.destroy()
    assert {span["cat"] for span in spans(folder)} == {"poptorch.inferenceModel"}
    assert [span["name"] for span in spans(folder)] == ["compile", "modelExecution", "destroy"]
