"""Variables of the SDK without effect on the emulated SDK: one warning that names what is not done."""

from __future__ import annotations

from pathlib import Path

import poptorch
import pytest
import torch
from poptorch.executor import compile_context

from tests.support.poptorch_models import Line, options

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/emulated-sdk.md"


@pytest.fixture
def compiled(monkeypatch, caplog):
    """Return a function that compiles a model with variables, and returns the warnings."""
    monkeypatch.setattr(compile_context, "_warned_variables", set())

    def compile_with(opts=None, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        poptorch.inferenceModel(Line(), opts or options()).compile(torch.ones(1))
        return [record.getMessage() for record in caplog.records]

    return compile_with


def test_a_report_that_is_not_written_is_one_warning(compiled):
    report = '{"autoReport.all": "true", "autoReport.directory": "./report"}'
    assert compiled(POPLAR_ENGINE_OPTIONS=report) == [
        "The emulated SDK ignores: POPLAR_ENGINE_OPTIONS (no profile.pop for PopVision is written in ./report)."
    ]
    assert compiled() == []


def test_enable_profiling_warns_too(compiled, tmp_path):
    (message,) = compiled(options().enableProfiling(tmp_path))
    assert (
        message == f"The emulated SDK ignores: enableProfiling (no profile.pop for PopVision is written in {tmp_path})."
    )


def test_all_variables_of_the_sdk_without_effect_are_in_one_warning(compiled):
    without_effect = {"POPTORCH_WAIT_FOR_IPU": "1", "GCDA_MONITOR": "1", "POPTORCH_NO_SUCH": "1"}
    without_effect.update(TF_POPLAR_FLAGS="-v", IPUOF_VIPU_API_HOST="host")
    silent = {"POPTORCH_LOG_LEVEL": "WARN", "POPTORCH_CACHE_DIR": "cache", "POPLAR_SDK_ENABLED": "/sdk"}
    (message,) = compiled(**without_effect, **silent, POPART_LOG_LEVEL="")
    assert [part.split(" (")[0] for part in message.partition(": ")[2].split("; ")] == sorted(without_effect)
    assert "POPTORCH_NO_SUCH (PopTorch 3.4 does not have it)" in message


def test_what_poprun_sets_and_other_processes_are_silent(compiled, monkeypatch, caplog):
    assert compiled(POPDIST_NUM_TOTAL_REPLICAS="2", IPUOF_VIPU_API_HOST="h", POPLAR_TARGET_OPTIONS="{}") == []
    second = options()
    second.Distributed.configureProcessId(1, 2)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    compile_context.warn_of_variables(second)
    assert not caplog.records


@pytest.mark.parametrize("text", ["autoReport.all=true", "[1]"])
def test_engine_options_that_are_no_json_object_are_an_error(compiled, text):
    with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS=.* is not (a )?JSON"):
        compiled(POPLAR_ENGINE_OPTIONS=text)


def test_the_reference_has_every_variable():
    rows = PAGE.read_text().split("## Variables of the SDK")[1].split("\n## ")[0].splitlines()
    for name, effect in {**compile_context.EFFECTS, **compile_context.NO_EFFECT}.items():
        assert any(row.startswith(f"| `{name}") and row.endswith(f"{effect} |") for row in rows), name
