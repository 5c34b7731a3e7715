"""Models: networks by name, or of one's own.

`resnet8`, `resnet14`, `resnet20` are the residual networks for small images of He et al. 2016, section 4.2 (6n + 2
layers). `resnet18` and larger come from torchvision; for images under 64 pixels they get the stem that is usual there,
one 3x3 convolution of stride 1 and no pooling. Vision transformers are torchvision's, too: ViT-B/16 as it is, and two
small ones that cut an image of any size into 8 x 8 patches.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.host import torchvision_import
from raypod.plan import user_code
from raypod.plan.config import SMALL_RESNETS, TORCHVISION_RESNETS, VISION_TRANSFORMERS, Config

# Layers, heads, width, width of the MLP (Dosovitskiy et al. 2021, table 1; the small ones with fewer layers).
_TRANSFORMERS: Dict[str, Tuple[int, int, int, int]] = {
    "vit_tiny": (6, 3, 192, 768),
    "vit_small": (8, 6, 384, 1536),
    "vit_b_16": (12, 12, 768, 3072),
}
_PATCHES = 8  # of the small ones, along a side; at least 2x2 pixels each
_POSITIONS_STD = 0.5


def build_model(config: Config, channels: int, side: int, classes: int) -> nn.Module:
    """The network of a config: float32 [n, channels, side, side] to logits [n, classes].

    Raises:
        ConfigError: the module of your own cannot be used.
    """
    network = _network(config, channels, side, classes)
    if config.training.norm != "batch":
        replace_batch_norms(network, config.training.norm)
    return network


def _network(config: Config, channels: int, side: int, classes: int) -> nn.Module:
    name = config.training.model
    if name == "tiny":
        return Tiny(channels, classes)
    if name in SMALL_RESNETS:
        return SmallResNet(1 + SMALL_RESNETS.index(name), channels, classes)
    if name in TORCHVISION_RESNETS:
        stem = config.training.stem
        has_small_stem = side < 64 if stem == "auto" else stem == "cifar"
        return _torchvision_resnet(name, channels, classes, has_small_stem)
    if name in VISION_TRANSFORMERS:
        return _vision_transformer(name, channels, side, classes)
    model = user_code.call(name, "training.model", channels, classes)
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


def _torchvision_resnet(name: str, channels: int, classes: int, has_small_stem: bool) -> nn.Module:
    # Imported here and not above: it takes a second, and the default model does without.
    torchvision_import.install()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=classes)
    if has_small_stem:
        model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    return model


def _vision_transformer(name: str, channels: int, side: int, classes: int) -> nn.Module:
    torchvision_import.install()
    from torchvision.models.vision_transformer import VisionTransformer

    is_small = name != "vit_b_16"
    patch = max(2, side // _PATCHES) if is_small else 16
    if side % patch:
        raise ConfigError(f"{name} cuts images into patches of {patch} pixels, and {side} pixels are no multiple of it")
    layers, heads, width, mlp_width = _TRANSFORMERS[name]
    model: Any = VisionTransformer(side, patch, layers, heads, width, mlp_width, num_classes=classes)
    if channels != 3:
        model.conv_proj = nn.Conv2d(channels, width, patch, patch)
    if is_small:
        # As strong as the patches: from the usual 0.02 a small network on little data does not find out where they lie.
        nn.init.normal_(model.encoder.pos_embedding, std=_POSITIONS_STD)
    network: nn.Module = model
    return network


# --- from norms: What may stand for BatchNorm: group normalisation, or frozen statistics.

_GROUPS = 32  # Wu and He 2018


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm whose statistics, scale and shift stay as they are in `norm`: buffers by the same names.

    Of a fresh one it changes nothing (mean 0, variance 1); it is for weights that are loaded and trained further.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            held = getattr(norm, name)  # None without an affine map, or without statistics
            fixed = torch.full((norm.num_features,), value) if held is None else held.detach().clone()
            self.register_buffer(name, fixed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, channels, h, w] to the same shape."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        return inputs * scale[:, None, None] + shift[:, None, None]


def replace_batch_norms(network: nn.Module, norm: str) -> None:
    """Put "group" or "frozen" norms in place of all `nn.BatchNorm2d` of a network.

    Raises:
        ConfigError: the network has none.
    """
    found = [
        (parent, name, part)
        for parent in network.modules()
        for name, part in parent.named_children()
        if isinstance(part, nn.BatchNorm2d)
    ]
    if not found:
        raise ConfigError(f"--norm {norm}: the model has no BatchNorm2d that it could stand for")
    for parent, name, part in found:
        setattr(parent, name, _group_norm(part.num_features) if norm == "group" else FrozenBatchNorm2d(part))


def _group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, or as many below that as divide the channels."""
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)
