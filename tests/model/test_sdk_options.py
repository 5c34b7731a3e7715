"""The options of PopTorch that a program gets are those of the section `ipu`."""

from __future__ import annotations

from typing import Any, Callable, Dict

import pytest

from raypod.model import program
from raypod.plan.plan import Plan

Make = Callable[..., Plan]


def options_of(plan: Plan) -> Any:
    return program.training_options(plan).toDict()


@pytest.mark.parametrize(
    ("ipu", "training", "expected"),
    [
        ({}, {"precision": "16.16"}, {"enableStochasticRounding": True, "partialsTypeMatMuls": "half"}),
        ({"partials": "half"}, {}, {"convolutionOptions": {"partialsType": "half"}}),
        (
            {"automatic_loss_scaling": True},
            {"precision": "16.32"},
            {"automaticLossScalingSettings.enabled": True},
        ),
        ({"stable_norm": False}, {}, {"enableStableNorm": False}),
        ({"floating_point_exceptions": True}, {}, {"enableFloatingPointChecks": True}),
    ],
)
def test_a_setting_is_an_option(
    make: Make, ipu: Dict[str, Any], training: Dict[str, Any], expected: Dict[str, Any]
) -> None:
    found = options_of(make(ipu=ipu, training=training))
    assert {name: found.get(name) for name in expected} == expected


def test_the_evaluation_does_not_round_stochastically(make: Make) -> None:
    plan = make(training={"precision": "16.16"})
    found = program.inference_options(plan).toDict()
    assert "enableStochasticRounding" not in found
    assert found["partialsTypeMatMuls"] == "half"
