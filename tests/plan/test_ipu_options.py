"""The section `ipu`: the calls of PopTorch that its keys make, and what contradicts them."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from raypod.errors import ConfigError
from raypod.plan import ipu_options
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.resolve import from_values


def config(ipu: Dict[str, Any], training: Dict[str, Any], pod: Dict[str, Any]) -> Config:
    return from_values({"ipu": ipu, "training": training, "pod": pod})


def calls(ipu: Dict[str, Any], **training: Any) -> List[str]:
    return ipu_options.describe(config(ipu, training, {}))["training"]


def test_half_weights_have_the_numerics_of_graphcores_applications_and_others_those_of_the_sdk() -> None:
    half = ["Precision.enableStochasticRounding(True)", "Precision.setPartialsType(torch.half)"]
    assert calls({}, precision="16.16")[:2] == half
    assert not [call for call in calls({}, precision="16.32") if call.startswith("Precision")]
    chosen = calls({"stochastic_rounding": False, "partials": "float"}, precision="16.16")
    assert chosen[:2] == ["Precision.enableStochasticRounding(False)", "Precision.setPartialsType(torch.float)"]
    evaluation = ipu_options.describe(config({}, {"precision": "16.16"}, {}))["evaluation"]
    assert half[1] in evaluation
    assert half[0] not in evaluation


@pytest.mark.parametrize(
    ("ipu", "training", "words"),
    [({"automatic_loss_scaling": True}, {}, "--automatic-loss-scaling needs gradients in half")],
)
def test_what_the_sdk_would_reject_after_compiling_is_a_mistake(
    ipu: Dict[str, Any], training: Dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(config(ipu, training, {}))


def test_the_line_of_the_emulated_sdk_names_what_has_no_effect_there() -> None:
    found = config({"stable_norm": True, "partials": "half", "floating_point_exceptions": True}, {}, {})
    ending = ", on which --partials and --stable-norm have no effect"
    assert ipu_options.without_effect(found, has_ipus=False) == ending
    assert ipu_options.without_effect(found, has_ipus=True) == ipu_options.without_effect(Config(), False) == ""
