"""Findings about a program (EMULATED_POD_FINDINGS): what strict mode raises is recorded, up to the first call."""

from __future__ import annotations

import ctypes
import json
import threading

import poptorch
import pytest
import torch
from poptorch.environment import logger
from poptorch.findings import Recorder
from torch import nn

from tests.support.poptorch_models import options

HOST = torch.ones(4)


class Refused(nn.Module):
    """A model with one finding of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch.zeros(1), name="feed")
        thread.start()
        thread.join()
        x = self.fc(x).tril() + HOST
        if x.sum() > 0:
            x = x * 2
        x = (x.half() * torch.ones(4, device=x.device)).float()
        return poptorch.identity_loss(poptorch.custom_op([x], "Absent", "test.findings", 1, [x])[0], "mean")


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setenv("EMULATED_POD_FINDINGS", str(tmp_path / "findings"))
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    recorder = Recorder()
    logger.addHandler(recorder)
    yield lambda: [json.loads(line) for line in (tmp_path / "findings").read_text().splitlines()]
    logger.removeHandler(recorder)


def test_each_kind_is_recorded_with_its_place_and_the_first_call_ends_the_program(lines):
    model = Refused()
    executor = poptorch.trainingModel(model, options(iterations=2), poptorch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SystemExit):
        executor(torch.ones(2, 4))
    found = {(line["level"], line["what"]): line for line in lines() if "level" in line}
    assert set(found) == {
        ("trouble", "thread"),
        ("trouble", "operator"),
        ("trouble", "forward"),
        ("warn", "precision"),
        ("warn", "custom operator"),
        ("ok", "memory"),
    }
    assert "aten::tril" in found["trouble", "operator"]["text"]
    places = [place for (_, what), line in found.items() if what != "memory" for place in line["places"]]
    assert all("test_poptorch_findings.py:" in place for place in places)
    end = lines()[-1]
    assert (end["event"], end["micro_batches"]) == ("end", 2)
    assert {line["event"] for line in lines() if "event" in line} == {"call", "compilation", "end"}


def test_an_exception_and_a_warning_are_findings(lines, monkeypatch):
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "")
    ctypes.cdll.LoadLibrary("build/absent_operators.so")
    with pytest.raises(RuntimeError, match="shapes"):
        poptorch.inferenceModel(nn.Linear(3, 3), options())(torch.ones(2, 4))
    warning, error = (line for line in lines() if "level" in line)
    assert (warning["level"], "absent_operators.so was not loaded" in warning["text"]) == ("warn", True)
    assert (error["level"], error["what"]) == ("trouble", "compilation")
    assert [place.partition(":")[0] for place in warning["places"] + error["places"]] == [
        "test_poptorch_findings.py"
    ] * 2
