"""Networks by name, the training step, its optimizers and options of PopTorch, and the check of the evaluation."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.events import CallReport
from raypod.plan import config
from raypod.plan.config import Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import Geometry, Plan
from raypod.plan.resolve import from_values
from raypod.plan.stored_code import names_of
from raypod.runtime.worker import devices, replica_model
from raypod.training.models import networks, optimizers, program, recent_results
from raypod.training.models.decoder import SIZES, Attention, Decoder, DecoderSize
from raypod.training.tasks.registry import facts_of, task_of
from tests.support.refused import refused

SMALL = DecoderSize(2, 2, 8)
CALLS = 70
RMSPROP, EPS = {"optimizer": "rmsprop", "rmsprop_tf": True}, {"eps": 1e-3, "momentum": 0.5}
COMBINED, SCALING = {"combined_accumulator": True}, {"loss_scaling": 128.0}
PORTABLE = {"target.deterministicWorkers": "portable"}
COLLECTIVES, SCHEDULE = "replicatedCollectivesSettings", "accumulateOuterFragmentSettings.schedule"
MERGED = f"{COLLECTIVES}.mergeAllReduceCollectives"
POPART = {"outlineThreshold": 10.0, "autoRecomputation": 1}
DITHERING = {"enableConvDithering": True}
DITHERING_IN_HALF = {"partialsType": "half", **DITHERING}
SHARDED = {"off_chip": "optimizer", "replicated_tensor_sharding": "optimizer,weights", "sharding_min_elements": 8}
PARTS = {"useReplicatedTensorSharding": 1, "minElementsForReplicatedTensorSharding": 8}
METRICS = (LOSS, Metric("accuracy", "higher"))
Make = Callable[..., Plan]
BATCH = (torch.ones(1, 4),)
LOSS_ONLY = SimpleNamespace(metrics=[SimpleNamespace(name="loss")], predictions=())
OF_THREE: Any = SimpleNamespace(task=LOSS_ONLY, geometry=SimpleNamespace(micro_batch_size=3))


def build(channels: int, side: int, classes: int, **training: object) -> Any:
    return networks.build_model(from_values({"training": training}), channels, side, classes)


@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [("tiny", 3, 8), ("resnet14", 1, 8), ("resnet18", 3, 32), ("vit_tiny", 1, 8), ("vit_small", 3, 32)]
    + [("efficientnet_b0", 1, 32), ("mobilenet_v3_small", 3, 32), ("mobilenet_v3_large", 1, 32)],
)
def test_networks_map_images_to_logits(name: str, channels: int, side: int) -> None:
    assert build(channels, side, 7, model=name)(torch.zeros(2, channels, side, side)).shape == (2, 7)
    for stem, size, kernel in (("auto", 32, 3), ("auto", 64, 7), ("cifar", 64, 3), ("imagenet", 32, 7)):
        assert build(3, size, 10, model="resnet18", stem=stem).conv1.kernel_size == (kernel, kernel)


def test_what_a_network_does_not_have_is_an_error() -> None:
    refused("patches of 16 pixels; the image size 30 must be", build, 3, 30, 10, model="vit_b_16")
    refused("no BatchNorm2d", build, 3, 32, 10, model="vit_tiny", norm="group")
    words = r"inception_v3 cannot be computed for images of 32 x 32 pixels \(.*size.*--image-size; its own is 299"
    refused(words, build, 3, 32, 7, model="torchvision:inception_v3")
    refused("torchvision has no such classifier; did you mean torchvision:resnet50", planned, "torchvision:resnt50")
    refused("torchvision:fcn_resnet50: torchvision has no such classifier", planned, "torchvision:fcn_resnet50")
    refused("as in torchvision:convnext_tiny", planned, "torchvision:")


def test_group_norms_keep_the_names_and_a_frozen_norm_computes_what_batch_norm_does() -> None:
    network = build(1, 8, 10, norm="group")
    kinds = {type(part) for part in network.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    parameters = [{name for name, _ in each.named_parameters()} for each in (network, build(1, 8, 10))]
    assert parameters[0] == parameters[1]
    norms = build(1, 8, 10, norm="group", norm_num_groups=4, norm_eps=0.01).modules()
    assert {(part.num_groups, part.eps) for part in norms if isinstance(part, nn.GroupNorm)} == {(4, 0.01)}
    batch_norm: Any = nn.BatchNorm2d(6).eval()
    for tensor in (batch_norm.weight, batch_norm.bias, batch_norm.running_mean, batch_norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    network, images = nn.Sequential(batch_norm), torch.randn(2, 6, 4, 4)
    expected = batch_norm(images)
    networks.replace_batch_norms(network, from_values({"training": {"norm": "frozen"}}).training)
    torch.testing.assert_close(network.train()(images), expected)
    assert not list(network.parameters())


@pytest.mark.parametrize("name", config.MOBILE_NETWORKS)
def test_efficientnets_and_mobilenets_are_those_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        ours = build(3, 224, 1000, model=name)
        theirs = getattr(importlib.import_module("torchvision.models"), name)()  # raypod has made it importable
    assert str(ours) == str(theirs)


def test_efficientnets_of_graphcore_have_groups_of_16_channels_and_a_smaller_expansion() -> None:
    given = {"efficientnet_group_dim": 16, "efficientnet_expand_ratio": 4, "norm": "group", "norm_num_groups": 4}
    for name in config.EFFICIENTNETS:
        with torch.device("meta"):
            network = build(3, 224, 1000, model=name, **given)
        spatial = [part for part in network.modules() if isinstance(part, nn.Conv2d) and part.kernel_size > (1, 1)][1:]
        assert len(spatial) == sum(type(part).__name__ == "MBConv" for part in network.modules())
        # The 24 channels of a block of B4 are one group.
        assert {part.in_channels // part.groups for part in spatial} == ({16} if name.endswith("0") else {16, 24})
        assert network.get_submodule("features.4.0.block.0.0").out_channels == 4 * (40 if name.endswith("0") else 56)
    assert build(3, 32, 10, model="efficientnet_b0", **given)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(ConfigError, match="--efficientnet-group-dim 20: the 144 channels of a block are no multiple"):
        build(3, 32, 10, model="efficientnet_b0", efficientnet_group_dim=20)


def test_vision_transformers_have_dropout_and_a_layer_and_residual_branches_can_begin_at_zero() -> None:
    given = {"vit_dropout": 0.1, "vit_attention_dropout": 0.2, "vit_representation_size": 40}
    network = build(3, 32, 10, model="vit_tiny", **given)
    assert {part.p for part in network.modules() if isinstance(part, nn.Dropout)} == {0.1}
    assert {part.dropout for part in network.modules() if isinstance(part, nn.MultiheadAttention)} == {0.2}
    assert network.heads.pre_logits.out_features == 40
    plain = build(3, 32, 10, model="vit_tiny")
    assert not plain.heads.head.weight.any()
    assert build(3, 32, 10, model="vit_tiny", optimizer="lamb").heads.head.weight.norm() > 1
    assert {part.p for part in plain.modules() if isinstance(part, nn.Dropout)} == {0.0}
    network = build(3, 64, 10, model="resnet50", zero_init_residual=True)
    zero = {name for name, each in network.named_parameters() if "weight" in name and not each.any()}
    blocks = {"layer1": 3, "layer2": 4, "layer3": 6, "layer4": 3}
    later = {f"{stage}.{block}.bn3.weight" for stage, count in blocks.items() for block in range(1, count)}
    assert zero == later | {f"{stage}.0.downsample.1.weight" for stage in blocks}


class ActivatedNorm(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()


def test_a_model_of_timm_gets_channels_and_classes_and_keeps_the_activations_in_its_norms(monkeypatch: Any) -> None:
    timm: Any = ModuleType("timm")
    timm.__spec__ = ModuleSpec("timm", None)
    timm.__version__, timm.is_model, timm.list_models = "1.0", ["one", "two"].__contains__, lambda: ["one", "two"]
    timm.create_model = lambda name, pretrained, num_classes, in_chans: nn.Sequential(
        nn.Conv2d(in_chans, num_classes, 3), ActivatedNorm(num_classes)
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    network = build(4, 32, 7, model="timm:one", norm="group")
    outputs = network(torch.randn(2, 4, 8, 8))
    assert (outputs.shape, float(outputs.detach().min()) >= 0) == ((2, 7, 6, 6), True)
    refused("--model timm:on: timm 1.0 has no such model; did you mean timm:one?", planned, "timm:on")
    assert names_of({"training": {"model": "timm:one"}}) == []
    assert names_of({"data": {"dataset": "timm:one"}}) == [("data.dataset", "timm:one")]
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("--model timm:one needs the package timm on every host: pip install timm", planned, "timm:one")
    refused("as in timm:convnext_tiny", planned, "timm:hf-hub:one")


def test_a_classifier_of_torchvision_fits_the_images_prepared_as_those_of_its_weights() -> None:
    for name, side in (("convnext_tiny", 32), ("vit_b_16", 32), ("googlenet", 64)):
        with torch.device("meta"):
            network = build(1, side, 7, model=f"torchvision:{name}").train()
            assert network(torch.zeros(2, 1, side, side)).shape == (2, 7)
        assert names_of({"training": {"model": f"torchvision:{name}"}}) == []
        planned(f"torchvision:{name}")
    values = {"data": {"dataset": "synthetic", "samples": 16}, "training": {"model": "torchvision:inception_v3"}}
    task = task_of(from_values(values))
    assert task.load().first_batch(1)[0].shape == (1, 3, 299, 299)
    assert task.example(2)[0].shape == (2, 3, 299, 299)
    assert (task.description()["mean"], task.description()["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    task = task_of(from_values({**values, "data": {"dataset": "digits", "image_size": 75}}))
    assert task.load().first_batch(1)[0].shape == (1, 1, 75, 75)
    assert len(task.description()["mean"]) == 1  # that of three colors says nothing about these images


def planned(model: str) -> None:
    facts_of(from_values({"training": {"model": model}}))


def decoder(dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL, 11, 6, dropout).eval()


def test_a_decoder_has_attention_as_torch_and_a_token_changes_no_logits_before_it() -> None:
    tokens = torch.randint(0, 11, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = decoder()(tokens), decoder()(changed)
    assert before.shape == (3, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=2).any()
    torch.testing.assert_close(decoder()(tokens[:, :3].int()), before[:, :3])  # int32, and a shorter sequence
    network, tokens = decoder(dropout=0.5), torch.randint(0, 11, (3, 6))
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert not torch.equal(network(tokens), network(tokens))
    torch.manual_seed(0)
    attention, hidden = Attention(SMALL, 0.0), torch.randn(3, 5, 8)
    query, key, value = (each.reshape(3, 5, 2, 4).transpose(1, 2) for each in attention.qkv(hidden).split(8, dim=2))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(hidden), attention.out(mixed.transpose(1, 2).reshape(3, 5, 8)))


def test_the_initial_loss_of_a_decoder_is_that_of_a_guess_and_its_sizes_those_of_the_help() -> None:
    torch.manual_seed(0)
    network = Decoder(SIZES["tiny"], 256, 32)
    tokens = torch.randint(0, 256, (4, 33))
    loss = functional.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm" in name and "weight" in name)))
        else:
            is_residual = name.endswith(("attention.out.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (math.sqrt(4) if is_residual else 1), rel=0.1)
    shapes = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4]
    expected = 12 * sum(math.prod(shape) for shape in shapes) + 2 * 768 + (50257 * 2 + 1024) * 768
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "normal_", lambda tensor, **_: tensor)  # drawing 163 million numbers takes seconds
        network = Decoder(SIZES["gpt2"], 50257, 1024)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected
    assert [(size.layers, size.width) for size in SIZES.values()] == [
        *((2, 128), (6, 384), (12, 768)),
        *((24, 1024), (36, 1280)),  # GPT-2 medium and large
    ]


def config_of(**training: object) -> Config:
    return from_values({"training": training})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_step_has_the_loss_and_gradients_of_torch(smoothing: float) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 4, 2, 2])
    expected = functional.cross_entropy(network(images), labels, label_smoothing=smoothing)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    configured = config_of(label_smoothing=smoothing)
    step = program.TrainingStep(task_of(configured), facts_of(configured).metrics, network, nn.Identity())
    trained = poptorch.trainingModel(step, optimizer=poptorch.optim.SGD(network.parameters(), lr=1.0))
    loss, _ = trained(images, labels)
    torch.testing.assert_close(loss, expected.detach())
    after = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    trained.destroy()
    for name, gradient in wanted.items():
        torch.testing.assert_close(before[name] - after[name], gradient)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "rmsprop"])
@pytest.mark.parametrize(("precision", "dtype"), [("16.16", torch.float16), ("16.32", torch.float32)])
def test_optimizer_states_have_the_precision_of_the_weights(name: str, precision: str, dtype: Any) -> None:
    parameters = [{"params": nn.Linear(2, 2).parameters()}]
    optimizer: Any = optimizers.build_optimizer(config_of(optimizer=name, precision=precision), parameters)
    assert (type(optimizer).__name__.lower(), optimizer.accum_type) == (name, dtype)
    if name == "sgd":
        assert optimizer.velocity_accum_type == dtype
    else:
        assert optimizer.first_order_momentum_accum_type == dtype
        assert optimizer.second_order_momentum_accum_type == torch.float32


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "adam", "betas": "0.8,0.9", "eps": 1e-6}, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ({"optimizer": "adamw", "bias_correction": False}, {"bias_correction": False, "betas": (0.9, 0.999)}),
        ({"optimizer": "lamb", "max_weight_norm": 10.0}, {"max_weight_norm": 10.0}),
        ({**RMSPROP, "rmsprop_alpha": 0.9, **EPS}, {"use_tf_variant": True, "alpha": 0.9, **EPS}),
        ({**COMBINED, "loss_scaling": 128.0}, {"use_combined_accum": True, "velocity_scaling": 128.0, **SCALING}),
        ({**COMBINED, "velocity_scaling": 4.0}, {"velocity_scaling": 4.0}),
        ({}, {"use_combined_accum": False, "momentum": 0.9}),
    ],
)
def test_settings_of_an_optimizer_are_those_of_poptorchs(settings: Dict[str, Any], expected: Dict[str, Any]) -> None:
    optimizer: Any = optimizers.build_optimizer(config_of(**settings), [{"params": nn.Linear(2, 2).parameters()}])
    found = {name: optimizer.param_groups[0].get(name, getattr(optimizer, name, None)) for name in expected}
    assert found == expected


def test_the_bound_of_biases_holds_for_all_parameters_of_one_dimension() -> None:
    weight, bias, scale = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (3,)))
    groups = [{"params": [bias, weight], "weight_decay": 0.1}, {"params": [scale], "max_weight_norm": 7.0}]
    settings = {"optimizer": "lamb", "max_weight_norm": 10.0}
    optimizer: Any = optimizers.build_optimizer(config_of(**settings, max_bias_norm=0.0), groups)
    found = [(group["params"], group["max_weight_norm"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [([weight], 10.0, 0.1), ([bias], 0.0, 0.1), ([scale], 7.0, 0.01)]
    assert len(optimizers.build_optimizer(config_of(**settings), groups).param_groups) == 2


def step_with_results(network: nn.Module, geometry: Geometry) -> program.TrainingStep:
    results = recent_results.RecentResults(geometry, 4)
    return program.TrainingStep(task_of(Config()), METRICS, network, nn.Identity(), results)


@pytest.fixture(scope="module", params=[(1, 1), (2, 3)], ids=["one micro-batch per call", "six micro-batches per call"])
def trained(request: Any) -> Iterator[Tuple[Geometry, Dict[str, Any], Dict[Tuple[int, int], CallReport]]]:
    """Sizes, the replicas' state after `CALLS` calls, and the report of each call and instance."""
    iterations, accumulation = request.param
    geometry = Geometry(2, 1, 1, 4, accumulation, iterations)
    options = poptorch.Options().replicationFactor(2).deviceIterations(iterations).broadcastBuffers(False)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1)
    training = poptorch.trainingModel(step_with_results(network, geometry), options, optimizer)
    reports = {}
    for call in range(CALLS):
        update, digest = call * iterations + (1 << 20), f"{call:04x}beef0000ffff"
        images = torch.randn(geometry.combined_batch_size, 3, 2, 2)
        labels = torch.arange(geometry.combined_batch_size) % 5
        outputs = training(images, labels, recent_results.call_words(geometry, update, digest))
        sums = recent_results.replica_sums(outputs[1], (iterations, accumulation, 2))
        reports[update, 0] = CallReport(0, update, sums, samples_digest=digest)
    yield geometry, training.emulatedReplicaState(), reports
    training.destroy()


def test_the_reports_of_the_last_calls_can_be_recovered_and_are_not_saved(trained: Any) -> None:
    geometry, state, reports = trained
    assert list(recent_results.lost_reports(state, geometry, list(reports))) == list(reports.values())[-64:]
    last = list(reports)[-1][0]
    of_two = dataclasses.replace(geometry, num_instances=2)  # each has the results of its replicas
    first, second = recent_results.lost_reports(state, of_two, [(last, 0), (last, 1)])
    assert (first.instance, second.instance) == (0, 1)
    assert tuple(one + other for one, other in zip(first.sums, second.sums)) == reports[last, 0].sums
    saved = recent_results.without_rows(state)
    assert saved is not None
    assert set(state["buffers"]) - set(saved["buffers"]) == {"recent_results.rows"}
    loaded = recent_results.with_empty_rows(saved, geometry, 4)
    assert loaded is not None
    assert loaded["buffers"]["recent_results.rows"].shape == state["buffers"]["recent_results.rows"].shape
    for each in (None, saved, loaded):
        assert list(recent_results.lost_reports(each, geometry, list(reports))) == []
    step = step_with_results(nn.Linear(2, 2), Geometry(2, 2, 1, 1, 1, 1))
    assert set(step.state_dict()) == {"network.weight", "network.bias"}


def options_of(plan: Plan) -> Any:
    return program.training_options(plan).toDict()


@pytest.mark.parametrize(
    ("ipu", "training", "expected"),
    [
        ({}, {"precision": "16.16"}, {"enableStochasticRounding": True, "partialsTypeMatMuls": "half"}),
        ({"partials": "half"}, {}, {"convolutionOptions": {"partialsType": "half"}}),
        ({"stable_norm": False}, {}, {"enableStableNorm": False}),
        ({"synthetic_data_on_device": True}, {}, {"syntheticDataMode": 2}),
        ({"floating_point_exceptions": True}, {}, {"enableFloatingPointChecks": True}),
        ({"available_memory_proportion": 0.2}, {}, {"available_memory_proportion": {0: 0.2}}),
        ({"recomputation": "all"}, {}, {"autoRecomputation": 4, "explicitRecomputation": True}),
        ({"io_tiles": 32}, {"execution": "sharded"}, {"numIOTiles": 32}),
        ({"prefetch_depth": 3}, {}, {"defaultPrefetchBufferingDepth": 3}),
        ({}, {}, {MERGED: True, "disableGradAccumulationTensorStreams": True, "engineOptions": PORTABLE}),
        ({}, {}, {f"{COLLECTIVES}.prepareScheduleForMergingCollectives": True, SCHEDULE: 0}),
        ({"merged_all_reduces": False}, {}, {MERGED: None}),
        ({"accumulator_streams": True}, {}, {"disableGradAccumulationTensorStreams": None}),
        (
            {"engine_options": ["opt.a=memory", "b=true"]},
            {},
            {"engineOptions": {**PORTABLE, "opt.a": "memory", "b": "true"}},
        ),
        ({"popart_patterns": "TiedGather=false"}, {}, {"patterns": {"TiedGather": False}}),
        ({"popart": POPART, "recomputation": "all"}, {}, POPART),
        (
            {"popart": {"convolutionOptions": DITHERING}},
            {"precision": "16.16"},
            {"convolutionOptions": DITHERING_IN_HALF},
        ),
        ({"automatic_loss_scaling": True}, {"precision": "16.32"}, {"automaticLossScalingSettings.enabled": True}),
        (SHARDED, {}, {"location_optimizer": {"onChip": 0, **PARTS}, "location_weight": {"onChip": 1, **PARTS}}),
    ],
)
def test_a_setting_is_an_option(make: Make, ipu: Any, training: Any, expected: Any) -> None:
    found = options_of(make(ipu=ipu, training=training))
    assert {name: found.get(name) for name in expected} == expected
    half = program.inference_options(make(training={"precision": "16.16"})).toDict()
    assert ("enableStochasticRounding" in half, half["partialsTypeMatMuls"]) == (False, "half")


def test_checkpoints_of_the_recomputation_are_the_outputs_of_modules_in_training(make: Make, monkeypatch: Any) -> None:
    kept: List[torch.Size] = []
    monkeypatch.setattr(poptorch, "recomputationCheckpoint", lambda output: kept.append(output.shape) or output)
    plan = make(ipu={"recomputation": "all", "recomputation_checkpoints": "0,*.inner"})
    inner = nn.Sequential()
    inner.add_module("inner", nn.Linear(4, 5))
    network = program.finish_network(plan, nn.Sequential(nn.Linear(3, 4), inner))
    network(torch.ones(2, 3))
    assert kept == [(2, 4), (2, 5)]
    network.eval()(torch.ones(2, 3))
    assert len(kept) == 2
    refused("innr matches no module of the network; there are .*inner", program.keep_outputs, network, ["*.innr"])
    plan = make(ipu={"recomputation": "all", "recomputation_checkpoints": "0"})
    monkeypatch.undo()
    (found,) = program.finish_network(plan, nn.Sequential(OneInATuple(3, 4)))(torch.ones(2, 3))
    assert found.shape == (2, 4)


class OneInATuple(nn.Linear):
    """Returns a tuple of one tensor, as the layers of transformers 4 do."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return (super().forward(inputs),)


@pytest.mark.parametrize("mode", ["accumulation-loop", "device-iteration-loop"])
def test_inputs_and_outputs_of_the_training_overlap(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    found: List[Any] = []
    for name in ("set_overlap_for_input", "set_overlap_for_output"):
        monkeypatch.setattr(poptorch, name, lambda tensors, mode: found.append((len(tensors), mode.value)) or tensors)
    plan = make(ipu={"io_tiles": 32, "overlap_io": mode}, training={"execution": "sharded"})
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    step = program.TrainingStep(task_of(plan.config), plan.task.metrics, network, nn.Identity())
    step(torch.ones(4, 3, 2, 2), torch.tensor([0, 4, 2, 2]))
    assert found == [(2, f"overlap_{mode.replace('-', '_')}")] * 2


def test_names_that_the_sdk_does_not_have_are_the_users_mistake() -> None:
    for text, name in (("Unknown uint64 option nonsense", "nonsense"), ("Unknown pattern 'Tied'", "Tied")):
        with pytest.raises(ConfigError, match=f"--popart: the SDK rejects {name}"), devices.CallGuard():
            raise poptorch.Error(text)


def network_of() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def check(network: nn.Module, outputs: Callable[[Any, torch.Tensor], Dict[str, Any]]) -> None:
    training = SimpleNamespace(precision="32.32")
    methods = {"evaluation_outputs": outputs, "training_outputs": None}
    task: Any = SimpleNamespace(config=SimpleNamespace(training=training), names=None, predictions=(), **methods)
    replica_model.check(OF_THREE, task, network, nn.Identity(), BATCH)


def states(network: nn.Module) -> Tuple[Any, ...]:
    weights = [tensor.tolist() for tensor in network.state_dict().values()]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return weights, [each.training for each in network.modules()], generators


def test_weights_buffers_modes_and_generators_stay() -> None:
    network, seen = network_of(), []
    network[0].eval()

    def outputs(run: Any, x: torch.Tensor) -> Dict[str, Any]:
        network.train()
        network(x + torch.rand(4) + np.random.rand() + random.random())  # the task holds its network
        seen.append(x.shape)
        return {"loss": (run(x).squeeze(1), 1)}

    before = states(network)
    check(network, outputs)
    assert (seen, states(network)) == ([(3, 4)], before)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_wrong_metrics_and_undefined_names_are_errors_and_what_the_host_cannot_compute_is_none() -> None:
    for outputs, words in (
        (lambda run, x: {"losses": (run(x), 1)}, "returned the metrics 'losses'; they are 'loss'"),
        (lambda run, x: {"loss": run(x).squeeze(1)[0]}, "'loss' must be a pair"),
        (lambda run, x: {"loss": (run(x).mean(0), 1)}, r"a tensor of shape \[1\] for 'loss'; sums are tensors with"),
    ):
        refused(words, check, network_of(), outputs)
    with pytest.raises(NameError, match="undefined"):
        check(network_of(), lambda run, x: {"loss": (undefined(run, x), 1)})  # type: ignore[name-defined]  # noqa: F821

    def outputs(run: Any, x: torch.Tensor) -> Dict[str, Any]:
        raise NotImplementedError("not implemented for 'Half'")

    check(network_of(), outputs)
