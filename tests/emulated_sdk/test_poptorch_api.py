"""The package: exported names, errors, hardware queries, log levels, `testing.allclose`."""

from __future__ import annotations

import logging
import os
import pickle

import poptorch
import pytest
import torch
from poptorch import environment


def test_exported_names_are_sorted_and_exist():
    assert poptorch.__all__ == sorted(poptorch.__all__)
    assert all(hasattr(poptorch, name) for name in poptorch.__all__)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        (poptorch.OutputMode.Default, 4),
        (poptorch.CommGroupType.NoGrouping, 3),
        (poptorch.VariableRetrievalMode.AllReplicas, 2),
        (poptorch.OverlapMode.NoOverlap, "no_overlap"),
        (poptorch.MeanReductionStrategy.Post, 1),
    ],
)
def test_enumerations_have_the_values_of_the_sdk(member, value):
    assert member.value == value


@pytest.mark.parametrize("kind", [poptorch.Error, poptorch.RecoverableError, poptorch.UnrecoverableError])
def test_errors_can_be_pickled(kind):
    error = pickle.loads(pickle.dumps(kind("no IPU", "some_type", "here")))
    assert type(error) is kind
    assert (str(error), error.message, error.type, error.location) == ("no IPU", "no IPU", "some_type", "here")


def test_a_recoverable_error_has_a_recovery_action():
    error = poptorch.RecoverableError("link down", recovery_action="LINK_RESET")
    assert pickle.loads(pickle.dumps(error)).recovery_action == "LINK_RESET"


def test_no_hardware_is_available_by_default(monkeypatch):
    monkeypatch.delenv("EMULATED_POD_IPUS", raising=False)
    assert not poptorch.ipuHardwareIsAvailable()
    with pytest.raises(AssertionError, match="No IPU hardware"):
        poptorch.ipuHardwareVersion()
    assert not poptorch.isRunningOnIpu()


def test_an_environment_variable_sets_the_number_of_available_ipus(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_IPUS", "16")
    available = {ipus for ipus in range(20) if poptorch.ipuHardwareIsAvailable(ipus)}
    assert available == {1, 2, 4, 8, 16}
    assert poptorch.ipuHardwareVersion() == 2


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5"])
def test_the_number_of_available_ipus_must_be_a_number(monkeypatch, text):
    monkeypatch.setenv("EMULATED_POD_IPUS", text)
    with pytest.raises(poptorch.Error, match=f"EMULATED_POD_IPUS='{text}' is not a number"):
        poptorch.ipuHardwareIsAvailable()


def test_importing_sets_rdmav_fork_safe():
    assert os.environ["RDMAV_FORK_SAFE"]


@pytest.fixture
def log_level():
    """Return a function that reads the logger's level, and restore the level afterwards."""
    logger = logging.getLogger("poptorch::python")
    before = logger.level
    yield lambda: logger.level
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("level", "severity"),
    [("TRACE", 5), ("DEBUG", 10), ("WARN", 30), ("ERR", 40), (0, 5), (2, 20), (6, 60)],
)
def test_log_levels_are_names_and_numbers(log_level, level, severity):
    poptorch.setLogLevel(level)
    assert log_level() == severity


@pytest.mark.parametrize("level", ["LOUD", "WARNING", "debug", 5, 7, -1, True, None, []])
def test_an_unknown_log_level_is_rejected(level):
    with pytest.raises(ValueError, match=r"Unknown log level: .* OFF, TRACE and WARN|Invalid log level integer"):
        poptorch.setLogLevel(level)


@pytest.mark.parametrize(("text", "severity"), [("INFO", 20), ("1", 10), ("off", 60), ("LOUD", 30)])
def test_the_environment_sets_the_log_level(monkeypatch, log_level, text, severity):
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", text)
    environment.set_level_from_environment()
    assert log_level() == severity


def results(values: object, dtype: torch.dtype = torch.float32) -> object:
    return {"loss": torch.tensor(values, dtype=dtype), "rest": (1, [torch.ones(2)])}


def test_allclose_compares_nested_results_of_any_dtype():
    assert poptorch.testing.allclose(results([1.0, 2.0]), results([1.0, 2.0 + 1e-7], torch.float64))
    assert poptorch.testing.allclose((torch.tensor(3),), [torch.tensor(3, dtype=torch.int32)])


@pytest.mark.parametrize("other", [[1.0, 2.1], [1.0], [[1.0, 2.0]]])
def test_allclose_detects_different_values_and_shapes(other):
    assert not poptorch.testing.allclose(results([1.0, 2.0]), results(other))


@pytest.mark.parametrize("other", [torch.ones(1), (torch.ones(1), torch.ones(1)), {"a": torch.ones(1)}, [1]])
def test_allclose_detects_different_nesting(other):
    assert not poptorch.testing.allclose([torch.ones(1)], other)
