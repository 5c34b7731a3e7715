"""Models, and the two programs around them that the replicas run: a training step and an evaluation step.

`resnet8`, `resnet14`, `resnet20` are the residual networks for small images of He et al. 2016, section 4.2 (6n + 2
layers). `resnet18` and larger come from torchvision; for images under 64 pixels they get the stem that is usual there,
one 3x3 convolution of stride 1 and no pooling.
"""

from __future__ import annotations

from typing import Tuple

import torch
from torch import nn
from torch.nn import functional

from raypod import torchvision_import
from raypod.config import SMALL_RESNETS, TORCHVISION_RESNETS, Config
from raypod.device_input import OnDeviceNormalisation
from raypod.errors import ConfigError
from raypod.user_code import import_attribute


def build_model(config: Config, channels: int, side: int, classes: int) -> nn.Module:
    """The network of a config: float32 [n, channels, side, side] to logits [n, classes].

    Raises:
        ConfigError: the module of your own cannot be used.
    """
    name = config.training.model
    if name == "tiny":
        return Tiny(channels, classes)
    if name in SMALL_RESNETS:
        return SmallResNet(1 + SMALL_RESNETS.index(name), channels, classes)
    if name in TORCHVISION_RESNETS:
        return _torchvision_resnet(name, channels, side, classes)
    model = import_attribute(name, "training.model")(channels, classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"training.model = {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


class Tiny(nn.Module):
    """A linear classifier of channel means: a few parameters, to see what a run costs besides its model."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[n, channels, height, width] to [n, classes]."""
        logits: torch.Tensor = self.head(images.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (1x1 where the shape changes)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
        hidden = functional.relu(self.bn1(self.conv1(inputs)))
        return functional.relu(self.bn2(self.conv2(hidden)) + self.shortcut(inputs))


class SmallResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels with `blocks` residual blocks each."""

    def __init__(self, blocks: int, channels: int, classes: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        width = 16
        for stage, outputs in enumerate((16, 32, 64)):
            for block in range(blocks):
                layers.append(ResidualBlock(width, outputs, stride=2 if stage and not block else 1))
                width = outputs
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[n, channels, height, width] to [n, classes]."""
        logits: torch.Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def _torchvision_resnet(name: str, channels: int, side: int, classes: int) -> nn.Module:
    # Imported here and not above: it takes a second, and the default model does without.
    torchvision_import.install()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=classes)
    if side < 64:
        model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    return model


class TrainingStep(nn.Module):
    """What a replica does with one micro-batch in training."""

    def __init__(self, network: nn.Module, normalisation: OnDeviceNormalisation) -> None:
        super().__init__()
        self.network, self.normalisation = network, normalisation

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy (the marked loss) and the number of right predictions, both 0-d."""
        logits = self.network(self.normalisation(images)).float()
        loss = functional.cross_entropy(logits, labels)
        return loss, (logits.argmax(dim=1) == labels).sum()


class EvaluationStep(nn.Module):
    """What a replica does with one micro-batch of the test split."""

    def __init__(self, network: nn.Module, normalisation: OnDeviceNormalisation) -> None:
        super().__init__()
        self.network, self.normalisation = network, normalisation

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [n, classes], float32."""
        logits: torch.Tensor = self.network(self.normalisation(images)).float()
        return logits
