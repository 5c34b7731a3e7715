"""Networks by name, replacements of BatchNorm, the training step, optimizers and learning rates."""

from __future__ import annotations

from typing import Any, Dict

import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.checkpoint import tensors
from raypod.errors import ConfigError
from raypod.model import networks, program
from raypod.model.program import build_optimizer, learning_rate
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_step_has_the_loss_and_gradients_of_torch(smoothing: float) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 4, 2, 2])
    expected = functional.cross_entropy(network(images), labels, label_smoothing=smoothing)
    expected.backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in network.named_parameters() if parameter.grad is not None
    }
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    step = program.TrainingStep(network, nn.Identity(), smoothing)
    trained = poptorch.trainingModel(step, optimizer=poptorch.optim.SGD(network.parameters(), lr=1.0))
    loss, _ = trained(images, labels)
    torch.testing.assert_close(loss, expected.detach())
    after = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    trained.destroy()
    for name, gradient in wanted.items():
        torch.testing.assert_close(before[name] - after[name], gradient)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb"])
@pytest.mark.parametrize(("precision", "dtype"), [("16.16", torch.float16), ("16.32", torch.float32)])
def test_optimizer_states_have_the_precision_of_the_weights_except_second_moments(
    name: str, precision: str, dtype: torch.dtype
) -> None:
    optimizer: Any = build_optimizer(config(optimizer=name, precision=precision), nn.Linear(2, 2))
    assert type(optimizer).__name__.lower() == name
    assert optimizer.accum_type == dtype
    if name == "sgd":
        assert optimizer.velocity_accum_type == dtype
    else:
        assert optimizer.first_order_momentum_accum_type == dtype
        assert optimizer.second_order_momentum_accum_type == torch.float32


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"lr_schedule": "constant"}, {0: 0.25, 2: 0.75, 3: 1.0, 39: 1.0}),
        ({"lr_schedule": "cosine"}, {0: 0.25, 3: 1.0, 39: 0.5 * (1 + -0.9963974885425265)}),
        ({"lr_schedule": "step", "lr_steps": [2, 3], "lr_gamma": 0.5}, {3: 1.0, 19: 1.0, 20: 0.5, 29: 0.5, 30: 0.25}),
    ],
    ids=["constant", "cosine", "step"],
)
def test_learning_rates(schedule: Dict[str, object], expected: Dict[int, float]) -> None:
    settings = config(learning_rate=1.0, warmup_updates=3, **schedule)
    rates = {update: learning_rate(settings, update, 40, updates_per_epoch=10) for update in expected}
    assert rates == pytest.approx(expected)


def test_loading_the_weights_of_another_network_names_the_first_difference() -> None:
    def network(width: int, *more: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2), *more)

    for saved, message in (
        (network(3), r"0.weight is \[5, 4\] in the model and \[3, 4\] in the checkpoint"),
        (network(5, nn.Linear(2, 2)), r"2.weight is missing in the model and \[2, 2\] in the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            tensors.load_weights(network(5), saved.state_dict())
