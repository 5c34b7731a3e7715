"""The section `ipu`: the calls of PopTorch that its keys make, and what contradicts them."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from raypod.errors import ConfigError
from raypod.plan import flags, ipu_options
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.resolve import from_values, resolve
from raypod.system.command_line import FlagParser


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


def test_shares_of_memory_are_one_value_or_one_for_each_ipu() -> None:
    pod = {"ipus_per_replica": 2}
    for given, shares in (("0.2", [0.2, 0.2]), ("0.2,0.3", [0.2, 0.3]), ([0.1, 0.4], [0.1, 0.4]), (0.5, [0.5, 0.5])):
        found = ipu_options.calls_of(config({"available_memory_proportion": given}, {}, pod))[0]
        assert found.arguments == ({f"IPU{index}": share for index, share in enumerate(shares)},)
    for wrong, words in (("1.5", "at most 1"), ("x", "must be a number"), ("0.1,,0.2", "empty entries")):
        with pytest.raises(ConfigError, match=words):
            from_values({"ipu": {"available_memory_proportion": wrong}})
    with pytest.raises(ConfigError, match="known are optimizer, weights, activations, accumulators"):
        from_values({"ipu": {"off_chip": "gradients"}})


def test_options_by_their_own_names_are_pairs_and_flags_can_be_repeated() -> None:
    parser = FlagParser(prog="test")
    flags.add_flags(parser)
    words = [
        "--popart",
        "a=1",
        "--popart",
        "b=[x, y]",
        "--engine-option",
        "k=l=m",
        "--popart-pattern",
        "TiedGather=true",
    ]
    found = resolve(parser.parse_args(words)).ipu
    assert found.popart == {"a": 1, "b": ["x", "y"]}
    assert (found.engine_options, found.popart_patterns) == ({"k": "l=m"}, {"TiedGather": True})
    assert from_values({"ipu": {"popart": found.popart}}).ipu.popart == found.popart
    for wrong, message in (("a", "write KEY=VALUE"), ("=1", "write KEY=VALUE"), (["a=1", "a=2"], "a is given twice")):
        with pytest.raises(ConfigError, match=message):
            from_values({"ipu": {"popart": wrong}})


@pytest.mark.parametrize(
    ("ipu", "training", "words"),
    [
        ({"automatic_loss_scaling": True}, {}, "--automatic-loss-scaling needs gradients in half"),
        ({"ipu_profile": __file__}, {}, "--ipu-profile .*test_ipu_options.py is a file"),
        (
            {"automatic_loss_scaling": True},
            {"precision": "16.16", "initial_loss_scaling": 1},
            "--initial-loss-scaling contradicts",
        ),
        ({"available_memory_proportion": "0.2,0.3"}, {}, "2 values, and a replica has 1 IPU: give"),
        ({"recomputation": "pipeline"}, {}, "--recomputation pipeline has no effect without a pipeline"),
        ({"recomputation_checkpoints": "a"}, {}, "with --recomputation none; add --recomputation all"),
        ({"replicated_tensor_sharding": "activations"}, {}, "each replica has its own"),
        ({"off_chip_min_elements": 3}, {}, "--off-chip-min-elements has no effect without --off-chip"),
        ({"io_tiles": 33}, {}, "--io-tiles 33 must be an even number"),
        ({"overlap_io": "accumulation-loop", "io_tiles": 32}, {}, "needs --io-tiles, as 32, and --execution sharded"),
        ({"overlap_io": "accumulation-loop"}, {"execution": "sharded"}, "needs --io-tiles"),
        ({"popart_patterns": "TiedGather=1"}, {}, "write TiedGather=true or TiedGather=false"),
        ({"popart": "disableOptimizerStateTensorStreams=true"}, {}, "checkpoints and repairs read the optimizer"),
    ],
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
