"""The names of PopTorch (`poptorch_api.txt`), errors, log levels, variables of the SDK, and the interpreter lock."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import re
import threading
import time
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Tuple

import poptorch
import pytest
import torch
from _pod.activation import CALL_S, LOAD_S
from poptorch import environment
from poptorch.executor import compile_context

from tests.support.poptorch_models import Line, options
from tests.support.refused import rejects

# Sections whose names are not importable modules.
PRIVATE_SECTIONS = {"poptorch (args)", "poptorch (options base)"}


class Entry(NamedTuple):
    path: str
    kind: str
    detail: str  # the parameters or the value


def entries() -> Iterator[Entry]:
    module, owner = "", ""
    for line in (Path(__file__).parent / "poptorch_api.txt").read_text().splitlines():
        section = re.match(r"## (.+)", line)
        if section:
            private = section.group(1) in PRIVATE_SECTIONS
            module = "" if private else section.group(1).replace("(ops)", ".ops").split(" (")[0].replace(" ", "")
        elif module and line.startswith(("def ", "class ")):
            kind, name, detail = re.match(r"(def|class) (\w+)\((.*)\)", line).groups()
            owner = f"{module}.{name}"
            yield Entry(owner, kind, detail)
        elif module and line.startswith("    "):
            value = re.match(r" +(\w+) = (.+)", line)
            if value:
                yield Entry(f"{owner}.{value.group(1)}", "value", value.group(2))
            else:
                kind, name, detail = re.match(r" +(?:(property|setter|static) )?(\w+)\((.*)\)", line).groups()
                yield Entry(f"{owner}.{name}", kind or "method", detail)


ENTRIES = list(entries())


def found(path: str) -> Any:
    value: Any = poptorch
    for name in path.split(".")[1:]:
        value = inspect.getattr_static(value, name) if inspect.isclass(value) else getattr(value, name)
    return value


def parameters(function: Any) -> List[Tuple[str, Any]]:
    """Return names, with their stars, and defaults; without `self`."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    listed = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return [(stars.get(each.kind, "") + each.name, each.default) for each in listed]


def expected_parameters(detail: str) -> List[Tuple[str, Any]]:
    namespace = {name: getattr(poptorch, name) for name in ("DataLoaderMode", "SharingStrategy")}
    return parameters(eval(f"lambda {detail}: None", namespace))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda each: each.path)
def test_names_parameters_defaults_and_values_equal_those_of_the_sdk(entry: Entry):
    owner, _, name = entry.path.rpartition(".")
    if entry.kind == "value":
        assert repr(found(owner)[name].value) == entry.detail
        return
    value = found(entry.path)
    if entry.kind in ("def", "class"):
        assert getattr(poptorch, name, value) is value
        assert inspect.isclass(value) == (entry.kind == "class")
    if entry.kind in ("def", "method", "static"):
        assert parameters(getattr(value, "__func__", value)) == expected_parameters(entry.detail)
    elif entry.kind != "class":
        assert isinstance(value, property)
        assert entry.kind != "setter" or value.fset is not None


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (poptorch, "AnchorMode", r"PopTorch 2\.5 removed it; use poptorch\.OutputMode"),
        (poptorch, "autocast", r"PopTorch 3\.1 removed it; cast in the model"),
        (poptorch.Options(), "Popart", r"PopTorch 2\.1 removed it; use _Popart"),
        (poptorch.Options().Precision, "autocastEnabled", r"'autocastEnabled': PopTorch 3\.1 removed it; cast in the"),
        (poptorch.Options().Precision, "autocastPolicy", r"PopTorch 3\.1 removed it; cast in the model"),
        (poptorch.Options().Training, "accumulationReductionType", "use accumulationAndReplicationReductionType"),
    ],
)
def test_a_name_of_an_older_version_is_an_error_with_its_version_and_replacement(owner, name, words):
    rejects(AttributeError, words, getattr, owner, name)


def test_exported_names_are_sorted_and_exist_and_importing_sets_rdmav_fork_safe():
    assert poptorch.__all__ == sorted(poptorch.__all__)
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)
    assert not hasattr(poptorch, "no_such_name")
    assert os.environ["RDMAV_FORK_SAFE"]


def test_errors_can_be_pickled():
    for kind in (poptorch.Error, poptorch.RecoverableError, poptorch.UnrecoverableError):
        error = pickle.loads(pickle.dumps(kind("no IPU", "some_type", "here")))
        assert type(error) is kind
        assert (str(error), error.message, error.type, error.location) == ("no IPU", "no IPU", "some_type", "here")
    recoverable = poptorch.RecoverableError("link down", recovery_action="LINK_RESET")
    assert pickle.loads(pickle.dumps(recoverable)).recovery_action == "LINK_RESET"


def test_an_environment_variable_sets_the_number_of_available_ipus(monkeypatch):
    monkeypatch.delenv("EMULATED_POD_IPUS", raising=False)
    assert not poptorch.ipuHardwareIsAvailable()
    rejects(AssertionError, "No IPU hardware", poptorch.ipuHardwareVersion)
    monkeypatch.setenv("EMULATED_POD_IPUS", "16")
    assert {ipus for ipus in range(20) if poptorch.ipuHardwareIsAvailable(ipus)} == {1, 2, 4, 8, 16}
    assert poptorch.ipuHardwareVersion() == 2
    for text in ("", "many", "-1", "1.5"):
        monkeypatch.setenv("EMULATED_POD_IPUS", text)
        rejects(poptorch.Error, f"EMULATED_POD_IPUS='{text}' is not a number", poptorch.ipuHardwareIsAvailable)


def test_log_levels_are_names_and_numbers(monkeypatch):
    logger = logging.getLogger("poptorch::python")
    monkeypatch.setattr(logger, "level", logger.level)
    for level, severity in {"TRACE": 5, "DEBUG": 10, "WARN": 30, "ERR": 40, 0: 5, 2: 20, 6: 60}.items():
        poptorch.setLogLevel(level)
        assert logger.level == severity
    for level in ("LOUD", "WARNING", "debug", 5, 7, -1, True, None, []):
        message = r"Unknown log level: .* OFF, TRACE and WARN|Invalid log level integer"
        rejects(ValueError, message, poptorch.setLogLevel, level)
    for text, severity in (("INFO", 20), ("1", 10), ("off", 60), ("LOUD", 30)):
        monkeypatch.setenv("POPTORCH_LOG_LEVEL", text)
        environment.set_level_from_environment()
        assert logger.level == severity


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([ONE, (ONE, ONE)], [ONE, (ONE, ONE + 1e-9)], True),
        (ONE, ONE + 0.1, False),
        *(([ONE], other, False) for other in (ONE, (ONE,), [ONE, ONE], {"a": ONE})),
        ({"a": ONE}, {"a": ONE}, TypeError),
        (ONE, 1, TypeError),
        (ONE, ONE.double(), RuntimeError),
    ],
)
def test_allclose_compares_nested_results_and_rejects_what_the_sdk_rejects(left, right, expected):
    with contextlib.nullcontext() if isinstance(expected, bool) else pytest.raises(expected):
        assert poptorch.testing.allclose(left, right) is expected


PAGE = Path(__file__).resolve().parents[2] / "docs/reference/emulated-sdk.md"


@pytest.fixture
def compiled(monkeypatch, caplog):
    monkeypatch.setattr(compile_context, "_warned_variables", set())

    def compile_with(opts=None, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        poptorch.inferenceModel(Line(), opts or options()).compile(torch.ones(1))
        return [record.getMessage() for record in caplog.records]

    return compile_with


@pytest.mark.parametrize("source", ["POPLAR_ENGINE_OPTIONS", "enableProfiling"])
def test_a_report_that_is_not_written_is_one_warning(compiled, source):
    if source == "enableProfiling":
        found = compiled(options().enableProfiling("./report"))
    else:
        found = compiled(POPLAR_ENGINE_OPTIONS='{"autoReport.all": "true", "autoReport.directory": "./report"}')
    assert found == [f"The emulated SDK ignores: {source} (no profile.pop for PopVision is written in ./report)."]
    assert compiled() == []


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


def test_the_reference_has_every_variable():
    rows = PAGE.read_text().split("## Variables of the SDK")[1].split("\n## ")[0].splitlines()
    for name, effect in {**compile_context.EFFECTS, **compile_context.NO_EFFECT}.items():
        assert any(row.startswith(f"| `{name}") and row.endswith(f"{effect} |") for row in rows), name


@pytest.fixture
def ticks() -> Iterator[List[float]]:
    found: List[float] = []
    end = threading.Event()

    def run() -> None:
        while not end.wait(0.005):
            found.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    end.set()
    thread.join()


def longest(ticks: List[float]) -> float:
    return max(after - before for before, after in zip(ticks, [*ticks[1:], time.monotonic()]))


@pytest.mark.parametrize("variable", [CALL_S, LOAD_S])
def test_no_other_thread_runs_meanwhile(variable: str, monkeypatch: pytest.MonkeyPatch, ticks: List[float]) -> None:
    model, x = poptorch.inferenceModel(torch.nn.Linear(2, 2)), torch.ones(1, 2)
    model.compile(x)
    model.detachFromDevice()
    while not ticks:
        time.sleep(0.01)
    monkeypatch.setenv(variable, "1.2")
    model(x)
    assert longest(ticks) > 0.9  # the signal of a profiler could end a sleep before


def test_a_wrong_time_and_engine_options_that_are_no_json_object_are_errors(compiled, monkeypatch):
    for text in ("autoReport.all=true", "[1]"):
        rejects(poptorch.Error, "POPLAR_ENGINE_OPTIONS=.* is not (a )?JSON", compiled, POPLAR_ENGINE_OPTIONS=text)
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS")
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv(CALL_S, text)
        model, message = poptorch.inferenceModel(torch.nn.Linear(2, 2)), f"EMULATED_POD_CALL_S={text}: must be a number"
        rejects(poptorch.Error, f"{message} of seconds", model, torch.ones(1, 2))
