"""The package as a whole: exported names, errors, queries."""

from __future__ import annotations

import os
import pickle

import poptorch
import pytest


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
def test_errors_cross_processes(kind):
    error = pickle.loads(pickle.dumps(kind("no IPU", "some_type", "here")))
    assert type(error) is kind
    assert (str(error), error.message, error.type, error.location) == ("no IPU", "no IPU", "some_type", "here")


def test_a_recoverable_error_names_the_reset_that_cures_it():
    error = poptorch.RecoverableError("link down", recovery_action="LINK_RESET")
    assert pickle.loads(pickle.dumps(error)).recovery_action == "LINK_RESET"


def test_no_hardware_is_claimed():
    assert not poptorch.ipuHardwareIsAvailable()
    assert poptorch.ipuHardwareVersion() == 0
    assert not poptorch.isRunningOnIpu()


def test_importing_makes_forks_safe_for_the_driver():
    assert os.environ["RDMAV_FORK_SAFE"]


def test_an_unknown_log_level_is_refused():
    with pytest.raises(ValueError, match="LOUD"):
        poptorch.setLogLevel("LOUD")
    poptorch.setLogLevel("WARN")
