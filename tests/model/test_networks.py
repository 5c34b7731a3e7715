"""Networks by name, and replacements of their batch normalization."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.model import networks
from raypod.plan.config import Config
from raypod.plan.resolve import from_values


def config(**training: object) -> Config:
    return from_values({"training": training})


@pytest.mark.parametrize(
    ("name", "channels", "side"),
    [("tiny", 3, 8), ("resnet14", 1, 8), ("resnet18", 3, 32), ("vit_tiny", 1, 8), ("vit_small", 3, 32)],
)
@pytest.mark.parametrize("classes", [7])
def test_networks_map_images_to_logits(name: str, channels: int, side: int, classes: int) -> None:
    network = networks.build_model(config(model=name), channels, side, classes)
    assert network(torch.zeros(2, channels, side, side)).shape == (2, classes)


@pytest.mark.parametrize(
    ("stem", "side", "kernel"), [("auto", 32, 3), ("auto", 64, 7), ("cifar", 64, 3), ("imagenet", 32, 7)]
)
def test_the_stem_depends_on_the_image_size_unless_configured(stem: str, side: int, kernel: int) -> None:
    network: Any = networks.build_model(config(model="resnet18", stem=stem), 3, side, 10)
    assert network.conv1.kernel_size == (kernel, kernel)


def test_image_sizes_must_be_multiples_of_the_patch_size() -> None:
    with pytest.raises(ConfigError, match="patches of 16 pixels; the image size 30 must be"):
        networks.build_model(config(model="vit_b_16"), 3, 30, 10)


def test_group_norms_replace_all_batch_norms_and_keep_the_names() -> None:
    network = networks.build_model(config(norm="group"), 1, 8, 10)
    kinds = {type(part) for part in network.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    parameters = {name for name, _ in networks.build_model(config(), 1, 8, 10).named_parameters()}
    assert {name for name, _ in network.named_parameters()} == parameters


def test_a_frozen_norm_computes_what_batch_norm_does_in_evaluation() -> None:
    batch_norm = nn.BatchNorm2d(6).eval()
    for tensor in (batch_norm.weight, batch_norm.bias, batch_norm.running_mean, batch_norm.running_var):
        assert isinstance(tensor, torch.Tensor)
        nn.init.uniform_(tensor, 0.5, 2.0)
    network, images = nn.Sequential(batch_norm), torch.randn(2, 6, 4, 4)
    expected = batch_norm(images)
    networks.replace_batch_norms(network, "frozen")
    torch.testing.assert_close(network.train()(images), expected)
    assert not list(network.parameters())


def test_replacing_norms_needs_a_batch_norm() -> None:
    with pytest.raises(ConfigError, match="no BatchNorm2d"):
        networks.build_model(config(model="vit_tiny", norm="group"), 3, 32, 10)
