"""Networks by name, replacements of their batch normalization, and the decoder of a language model."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan import config
from raypod.plan.compatibility import check_compatible
from raypod.plan.resolve import from_values
from raypod.plan.stored_code import names_of
from raypod.training.models import networks
from raypod.training.models.decoder import SIZES, Attention, Decoder, DecoderSize
from raypod.training.tasks.registry import facts_of, task_of

SMALL = DecoderSize(2, 2, 8)


def build(channels: int, side: int, classes: int, **training: object) -> Any:
    return networks.build_model(from_values({"training": training}), channels, side, classes)


@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [("tiny", 3, 8), ("resnet14", 1, 8), ("resnet18", 3, 32), ("vit_tiny", 1, 8), ("vit_small", 3, 32)]
    + [("efficientnet_b0", 1, 32), ("mobilenet_v3_small", 3, 32), ("mobilenet_v3_large", 1, 32)],
)
def test_networks_map_images_to_logits(name: str, channels: int, side: int) -> None:
    assert build(channels, side, 7, model=name)(torch.zeros(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize(
    ("stem", "side", "kernel"), [("auto", 32, 3), ("auto", 64, 7), ("cifar", 64, 3), ("imagenet", 32, 7)]
)
def test_the_stem_depends_on_the_image_size_unless_configured(stem: str, side: int, kernel: int) -> None:
    assert build(3, side, 10, model="resnet18", stem=stem).conv1.kernel_size == (kernel, kernel)


def test_what_a_network_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="patches of 16 pixels; the image size 30 must be"):
        build(3, 30, 10, model="vit_b_16")
    with pytest.raises(ConfigError, match="no BatchNorm2d"):
        build(3, 32, 10, model="vit_tiny", norm="group")


def test_group_norms_replace_all_batch_norms_and_keep_the_names() -> None:
    network = build(1, 8, 10, norm="group")
    kinds = {type(part) for part in network.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    parameters = [{name for name, _ in each.named_parameters()} for each in (network, build(1, 8, 10))]
    assert parameters[0] == parameters[1]
    norms = build(1, 8, 10, norm="group", norm_num_groups=4, norm_eps=0.01).modules()
    assert {(part.num_groups, part.eps) for part in norms if isinstance(part, nn.GroupNorm)} == {(4, 0.01)}


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


def test_vision_transformers_have_dropout_and_a_layer_before_the_classifier() -> None:
    given = {"vit_dropout": 0.1, "vit_attention_dropout": 0.2, "vit_representation_size": 40}
    network = build(3, 32, 10, model="vit_tiny", **given)
    assert {part.p for part in network.modules() if isinstance(part, nn.Dropout)} == {0.1}
    assert {part.dropout for part in network.modules() if isinstance(part, nn.MultiheadAttention)} == {0.2}
    assert network.heads.pre_logits.out_features == 40
    plain = build(3, 32, 10, model="vit_tiny")
    assert not plain.heads.head.weight.any()
    assert build(3, 32, 10, model="vit_tiny", optimizer="lamb").heads.head.weight.norm() > 1
    assert {part.p for part in plain.modules() if isinstance(part, nn.Dropout)} == {0.0}


def test_zero_init_residual_lets_the_blocks_begin_as_one_of_their_branches() -> None:
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


def test_a_model_of_timm_gets_channels_and_classes_and_keeps_the_activations_in_its_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    with pytest.raises(ConfigError, match="--model timm:on: timm 1.0 has no such model; did you mean timm:one?"):
        planned("timm:on")
    assert names_of({"training": {"model": "timm:one"}}) == []
    assert names_of({"data": {"dataset": "timm:one"}}) == [("data.dataset", "timm:one")]
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--model timm:one needs the package timm on every host: pip install timm"):
        planned("timm:one")
    with pytest.raises(ConfigError, match="as in timm:convnext_tiny"):
        planned("timm:hf-hub:one")


@pytest.mark.parametrize(("name", "side"), [("convnext_tiny", 32), ("vit_b_16", 32), ("googlenet", 64)])
def test_a_classifier_of_torchvision_fits_the_images(name: str, side: int) -> None:
    with torch.device("meta"):
        network = build(1, side, 7, model=f"torchvision:{name}").train()
        assert network(torch.zeros(2, 1, side, side)).shape == (2, 7)
    assert names_of({"training": {"model": f"torchvision:{name}"}}) == []
    planned(f"torchvision:{name}")


def test_images_that_are_too_small_for_a_classifier_name_its_size() -> None:
    words = r"inception_v3 cannot be computed for images of 32 x 32 pixels \(.*size.*--image-size; its own is 299"
    with pytest.raises(ConfigError, match=words):
        build(3, 32, 7, model="torchvision:inception_v3")


def test_the_images_of_a_classifier_of_torchvision_are_prepared_as_those_of_its_weights() -> None:
    values = {"data": {"dataset": "synthetic", "samples": 16}, "training": {"model": "torchvision:inception_v3"}}
    task = task_of(from_values(values))
    assert task.load().first_batch(1)[0].shape == (1, 3, 299, 299)
    assert task.example(2)[0].shape == (2, 3, 299, 299)
    assert (task.description()["mean"], task.description()["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    task = task_of(from_values({**values, "data": {"dataset": "digits", "image_size": 75}}))
    assert task.load().first_batch(1)[0].shape == (1, 1, 75, 75)
    assert len(task.description()["mean"]) == 1  # that of three colors says nothing about these images


def test_what_is_no_classifier_of_torchvision_is_an_error() -> None:
    with pytest.raises(ConfigError, match="torchvision has no such classifier; did you mean torchvision:resnet50"):
        planned("torchvision:resnt50")
    with pytest.raises(ConfigError, match="torchvision:fcn_resnet50: torchvision has no such classifier"):
        planned("torchvision:fcn_resnet50")
    with pytest.raises(ConfigError, match="as in torchvision:convnext_tiny"):
        planned("torchvision:")


def planned(model: str) -> None:
    facts_of(from_values({"training": {"model": model}}))


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"norm_eps": 0.1}, "--norm-num-groups and --norm-eps have no effect without --norm group"),
        ({"zero_init_residual": True}, "--zero-init-residual has no effect on --model resnet8"),
        ({"vit_dropout": 0.1}, "has no effect on --model resnet8; use vit_tiny, vit_small or vit_b_16"),
        ({"efficientnet_group_dim": 2}, "has no effect on --model resnet8; use efficientnet_b0 or efficientnet_b4"),
    ],
)
def test_settings_of_other_networks_are_a_mistake(training: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(from_values({"training": training}))


def test_a_frozen_norm_computes_what_batch_norm_does_in_evaluation() -> None:
    batch_norm: Any = nn.BatchNorm2d(6).eval()
    for tensor in (batch_norm.weight, batch_norm.bias, batch_norm.running_mean, batch_norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    network, images = nn.Sequential(batch_norm), torch.randn(2, 6, 4, 4)
    expected = batch_norm(images)
    networks.replace_batch_norms(network, from_values({"training": {"norm": "frozen"}}).training)
    torch.testing.assert_close(network.train()(images), expected)
    assert not list(network.parameters())


def decoder(dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL, 11, 6, dropout).eval()


def test_a_token_changes_no_logits_before_it() -> None:
    tokens = torch.randint(0, 11, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = decoder()(tokens), decoder()(changed)
    assert before.shape == (3, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=2).any()
    torch.testing.assert_close(decoder()(tokens[:, :3].int()), before[:, :3])  # int32, and a shorter sequence


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    attention, hidden = Attention(SMALL, 0.0), torch.randn(3, 5, 8)
    query, key, value = (each.reshape(3, 5, 2, 4).transpose(1, 2) for each in attention.qkv(hidden).split(8, dim=2))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention(hidden), attention.out(mixed.transpose(1, 2).reshape(3, 5, 8)))


def test_the_initial_loss_is_that_of_a_guess_and_residual_branches_are_scaled() -> None:
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


def test_dropout_is_active_in_training_only() -> None:
    network, tokens = decoder(dropout=0.5), torch.randint(0, 11, (3, 6))
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert not torch.equal(network(tokens), network(tokens))


def test_the_sizes_are_those_of_the_help_text() -> None:
    # GPT-2 has 124 million parameters, of which its output layer shares 50,257 x 768 with the embedding.
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
