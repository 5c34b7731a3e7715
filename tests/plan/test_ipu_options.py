"""The section `ipu`: the calls of PopTorch that its keys make, what contradicts them, and `ipu_config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.plan import flags, ipu_options, resolve
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.system.command_line import FlagParser
from tests.support.refused import refused

BOXES, IMAGENET, MIXUP = {"bounding_boxes": "b.csv"}, {"dataset": "imagenet"}, {"mixup_alpha": 0.1}
CUTMIX = {"cutmix_lambda_low": 0.25, "cutmix_lambda_high": 0.75, "cutmix_disable_prob": 0.3}
PATTERN, LOSS_SCALING = ["--popart-pattern", "TiedGather=true"], "--initial-loss-scaling contradicts"
# As Graphcore has published one for BERT.
BERT = """{"embedding_serialization_factor": 2, "enable_half_partials": true, "executable_cache_dir": "./exe_cache",
"gradient_accumulation_steps": 16, "inference_device_iterations": 5, "ipus_per_replica": 4,
"inference_replication_factor": {"default": 4, "pod16": 4}, "layers_per_ipu": [3, 3, 3, 3],
"matmul_proportion": [0.22, 0.2, 0.2, 0.25], "optimizer_state_offchip": true, "optimum_version": "1.0.0",
"recompute_checkpoint_every_layer": true, "replicated_tensor_sharding": true,
"replication_factor": {"default": 2, "pod16": 4}, "seed": 7, "transformers_version": "4.20.0"}"""


def config(ipu: Dict[str, Any], training: Dict[str, Any], pod: Dict[str, Any]) -> Config:
    return from_values({"ipu": ipu, "training": training, "pod": pod})


def calls(ipu: Dict[str, Any], **training: Any) -> List[str]:
    return ipu_options.describe(config(ipu, training, {}))["training"]


def test_half_weights_have_the_numerics_of_graphcores_applications_and_the_line_of_the_emulated_sdk() -> None:
    half = ["Precision.enableStochasticRounding(True)", "Precision.setPartialsType(torch.half)"]
    assert calls({}, precision="16.16")[:2] == half
    assert not [call for call in calls({}, precision="16.32") if call.startswith("Precision")]
    chosen = calls({"stochastic_rounding": False, "partials": "float"}, precision="16.16")
    assert chosen[:2] == ["Precision.enableStochasticRounding(False)", "Precision.setPartialsType(torch.float)"]
    evaluation = ipu_options.describe(config({}, {"precision": "16.16"}, {}))["evaluation"]
    assert half[1] in evaluation
    assert half[0] not in evaluation
    found = config({"stable_norm": True, "partials": "half", "floating_point_exceptions": True}, {}, {})
    ending = ", on which --partials and --stable-norm have no effect"
    assert ipu_options.without_effect(found, has_ipus=False) == ending
    assert ipu_options.without_effect(found, has_ipus=True) == ipu_options.without_effect(Config(), False) == ""


def test_shares_of_memory_are_one_value_or_one_for_each_ipu_and_options_by_name_are_pairs() -> None:
    pod = {"ipus_per_replica": 2}
    for given, shares in (("0.2", [0.2, 0.2]), ("0.2,0.3", [0.2, 0.3]), ([0.1, 0.4], [0.1, 0.4]), (0.5, [0.5, 0.5])):
        found = ipu_options.calls_of(config({"available_memory_proportion": given}, {}, pod))[0]
        assert found.arguments == ({f"IPU{index}": share for index, share in enumerate(shares)},)
    for wrong, words in (("1.5", "at most 1"), ("x", "must be a number"), ("0.1,,0.2", "empty entries")):
        refused(words, from_values, {"ipu": {"available_memory_proportion": wrong}})
    refused("known are optimizer, weights, activations, accumulators", from_values, {"ipu": {"off_chip": "gradients"}})
    parser = FlagParser(prog="test")
    flags.add_flags(parser)
    words = ["--popart", "a=1", "--popart", "b=[x, y]", "--engine-option", "k=l=m", *PATTERN]
    found = resolve.resolve(parser.parse_args(words)).ipu
    assert found.popart == {"a": 1, "b": ["x", "y"]}
    assert (found.engine_options, found.popart_patterns) == ({"k": "l=m"}, {"TiedGather": True})
    assert from_values({"ipu": {"popart": found.popart}}).ipu.popart == found.popart
    for wrong, message in (("a", "write KEY=VALUE"), ("=1", "write KEY=VALUE"), (["a=1", "a=2"], "a is given twice")):
        refused(message, from_values, {"ipu": {"popart": wrong}})


@pytest.mark.parametrize(
    ("ipu", "training", "words"),
    [
        ({"automatic_loss_scaling": True}, {}, "--automatic-loss-scaling needs gradients in half"),
        ({"ipu_profile": __file__}, {}, "--ipu-profile .*test_ipu_options.py is a file"),
        ({"automatic_loss_scaling": True}, {"precision": "16.16", "initial_loss_scaling": 1}, LOSS_SCALING),
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
def test_what_the_sdk_would_reject_after_compiling_is_a_mistake(ipu: Any, training: Any, words: str) -> None:
    refused(words, check_compatible, config(ipu, training, {}))


def config_of(folder: Path, content: Any, given: Dict[str, Any]) -> Any:
    path = folder / "ipu_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    values, source = resolve.combine({"ipu.ipu_config": str(path), **given}, None)
    return resolve.from_values(values, source)


def test_the_settings_of_the_file_count_and_the_command_line_takes_precedence(tmp_path: Path, capsys: Any) -> None:
    config = config_of(tmp_path, BERT, {"training.seed": 1})
    pod, training, ipu = config.pod, config.training, config.ipu
    assert (pod.replicas, pod.ipus_per_replica, pod.executable_cache_path) == (2, 4, "./exe_cache")
    assert (training.gradient_accumulation, training.layers_per_ipu) == (16, (3, 3, 3, 3))
    assert (training.evaluation_iterations, training.seed) == (5, 1)  # the command line takes precedence
    assert ipu.available_memory_proportion == (0.22, 0.2, 0.2, 0.25)
    assert (ipu.partials, ipu.off_chip, ipu.replicated_tensor_sharding) == ("half", ("optimizer",), ("optimizer",))
    assert ipu.ipu_config is None
    shown = capsys.readouterr().err
    assert "5 keys without effect: embedding_serialization_factor, inference_replication_factor, optimum" in shown
    training = config_of(tmp_path, BERT, {"training.pipeline_balance": "time"}).training
    assert (training.layers_per_ipu, training.pipeline_balance) == (None, "time")
    training = config_of(tmp_path, {"layers_per_ipu": [-1], "ipus_per_replica": 2}, {}).training
    assert (training.layers_per_ipu, training.pipeline_balance) == (None, "parameters")
    config = config_of(tmp_path, {"layers_per_ipu": [12], "replication_factor": 1, "matmul_proportion": 0.3}, {})
    assert (config.pod.ipus_per_replica, config.training.layers_per_ipu) == (1, None)
    assert config.ipu.available_memory_proportion == (0.3,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"layer_per_ipu": [1]}, "has no key 'layer_per_ipu'; did you mean layers_per_ipu?"),
        ({"layers_per_ipu": [1, -1]}, r"layers_per_ipu = \[1, -1\] has -1 beside numbers"),
        ({"serialized_embedding_splits_per_ipu": [1, 1]}, "serialized_embedding_splits_per_ipu = .* no counterpart"),
        ([], "is no JSON object"),
    ],
)
def test_a_key_that_cannot_be_followed_is_an_error(content: Any, words: str, tmp_path: Path) -> None:
    refused(words, config_of, tmp_path, content, {})
    refused("--ipu-config none.json: No such file", resolve.combine, {"ipu.ipu_config": "none.json"}, None)


@pytest.mark.parametrize(
    ("training", "data", "words"),
    [
        ({"optimizer": "adamw", "max_bias_norm": 0.0}, {}, "it is for lamb"),
        ({"betas": "0.8,0.9"}, {}, "--betas has no effect on --optimizer sgd; it is for adam, adamw or lamb"),
        ({"bias_correction": False}, {}, "it is for adamw or lamb"),
        ({"optimizer": "adam", "combined_accumulator": True}, {}, "it is for sgd"),
        ({"velocity_scaling": 2.0}, {}, "--velocity-scaling has no effect without --combined-accumulator"),
        ({"optimizer": "rmsprop", "max_grad_norm": 1.0}, {}, "RMSprop cannot clip gradients"),
        ({"norm_eps": 0.1}, {}, "--norm-num-groups and --norm-eps have no effect without --norm group"),
        ({"zero_init_residual": True}, {}, "--zero-init-residual has no effect on --model resnet8"),
        ({"vit_dropout": 0.1}, {}, "has no effect on --model resnet8; use vit_tiny, vit_small or vit_b_16"),
        ({"efficientnet_group_dim": 2}, {}, "has no effect on --model resnet8; use efficientnet_b0 or efficientnet_b4"),
        ({}, {"policy": "auto-augment"}, "--policy auto-augment has no effect without --dataset imag"),
        ({}, {"random_erasing": 0.5}, "--random-erasing 0.5 has no effect without --dataset imagef"),
        ({}, {**IMAGENET, "random_erasing": 0.5, "augment": False}, "no effect with --no-augment"),
        ({}, {**IMAGENET, "rand_augment_ops": 3}, "--rand-augment-ops 3 has no effect without --policy rand"),
        ({}, {**IMAGENET, "policy": "auto-augment", "rand_augment_magnitude": 3}, "--rand-augment-magnitude 3 has"),
        ({}, {**BOXES, "dataset": "digits"}, "b.csv has no effect without --dataset imagefolder or imagenet: omit"),
        ({}, {**BOXES, "dataset": "shards"}, "b.csv has no effect without --dataset imagefolder or imagenet: omit"),
        ({}, {**BOXES, **IMAGENET, "augment": False}, "--bounding-boxes b.csv has no effect with --no-augment"),
        ({}, {"cutmix_lambda_low": 0.5}, "--cutmix-lambda-low 0.5 is greater than --cutmix-lambda-high 0"),
        ({}, {"cutmix_disable_prob": 0.5}, "no effect without --cutmix-lambda-low and"),
        ({}, {**MIXUP, "augment": False}, "--mixup-alpha has no effect with --no-augment"),
        ({"batch_size": 1}, MIXUP, "--batch-size 1: mixup combines the images of a micro-batch, and needs at least 2"),
        ({"batch_size": 2}, {**MIXUP, **CUTMIX}, "--batch-size 2: mixup with cutmix .* at least 3"),
    ],
)
def test_settings_of_another_optimizer_network_or_data_set_are_mistakes(training: Any, data: Any, words: str) -> None:
    refused(words, check_compatible, from_values({"training": training, "data": data}))
