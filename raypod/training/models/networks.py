"""Networks by name or of the user, replacements of their batch normalization, and the network that a task calls.

`resnet8`, `resnet14`, `resnet20` are the residual networks for small images of He et al. 2016, section 4.2 (6n + 2
layers). `resnet18` and larger come from torchvision; for images under 64 pixels their stem is one 3x3 convolution of
stride 1 without pooling, as is usual for CIFAR. The vision transformers are torchvision's: ViT-B/16, and two small ones
that divide an image of any size into 8 x 8 patches. `library_models` has the others.

EfficientNet (Tan and Le 2019) and MobileNet v3 (Howard et al. 2019) of torchvision, and models of timm by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any, Callable, Dict, Tuple

import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import (
    MOBILE_NETWORKS,
    SMALL_RESNETS,
    TIMM,
    TORCHVISION,
    TORCHVISION_RESNETS,
    VISION_TRANSFORMERS,
    Config,
    TrainingSection,
)
from raypod.system import torchvision_import
from raypod.system.command_line import nearest
from raypod.training.models import library_models

# Layers, heads, width, width of the MLP (Dosovitskiy et al. 2021, table 1; the small ones have fewer layers).
_TRANSFORMERS: Dict[str, Tuple[int, int, int, int]] = {
    "vit_tiny": (6, 3, 192, 768),
    "vit_small": (8, 6, 384, 1536),
    "vit_b_16": (12, 12, 768, 3072),
}
_PATCHES = 8  # of the small transformers, per side; each at least 2x2 pixels
_POSITIONS_STD = 0.5
_GROUPS, _EPS = 32, 1e-5  # of group normalization (Wu and He 2018), and torch's default


def build_model(config: Config, channels: int, side: int, classes: int) -> nn.Module:
    """Return the network of a config, which maps float32 [n, channels, side, side] to logits [n, classes].

    Raises:
        ConfigError: the user's function cannot be used, or the network does not fit the images or `training.norm`.
    """
    network = _network(config, channels, side, classes)
    if config.training.model.startswith((TIMM, TORCHVISION)):
        library_models.check_size(network, config.training.model, channels, side)
    if config.training.norm != "batch":
        replace_batch_norms(network, config.training)
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
        network = _torchvision_resnet(name, channels, classes, has_small_stem)
        if config.training.zero_init_residual:
            _zero_last_norms(network)
        return network
    if name in MOBILE_NETWORKS:
        return build_torchvision(config.training, channels, classes)
    if name.startswith(TIMM):
        return build_timm(name, channels, classes)
    if name.startswith(TORCHVISION):
        return library_models.build_torchvision(name, channels, side, classes)
    if name in VISION_TRANSFORMERS:
        return _vision_transformer(config.training, channels, side, classes)
    model = user_code.call(name, "training.model", channels, classes)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"training.model = {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


class Tiny(nn.Module):
    """A linear classifier of the channel means, for measuring the overhead of a run."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [n, channels, height, width] to [n, classes]."""
        logits: torch.Tensor = self.head(images.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

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
        """Map [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""
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
        """Map [n, channels, height, width] to [n, classes]."""
        logits: torch.Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def _torchvision_resnet(name: str, channels: int, classes: int, has_small_stem: bool) -> nn.Module:
    model: nn.Module = getattr(library_models.torchvision_models(), name)(num_classes=classes)
    if has_small_stem:
        model.conv1 = nn.Conv2d(channels, 64, 3, 1, 1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        library_models.replace_stem(model, channels)
    return model


def _zero_last_norms(network: nn.Module) -> None:
    """Begin as Graphcore's ResNets: the first block of a stage as its branch, and the others as the identity."""
    for block in network.modules():
        if isinstance(getattr(block, "bn2", None), nn.BatchNorm2d):
            shortcut: Any = getattr(block, "downsample", None)
            last: Any = getattr(block, "bn3", getattr(block, "bn2", None)) if shortcut is None else shortcut[1]
            nn.init.zeros_(last.weight)


def _vision_transformer(training: TrainingSection, channels: int, side: int, classes: int) -> nn.Module:
    name = training.model
    is_small = name != "vit_b_16"
    patch = max(2, side // _PATCHES) if is_small else 16
    if side % patch:
        raise ConfigError(
            f"{name} divides images into patches of {patch} pixels; the image size {side} must be a multiple of it"
        )
    layers, heads, width, mlp_width = _TRANSFORMERS[name]
    model: Any = library_models.torchvision_models().VisionTransformer(
        *(side, patch, layers, heads, width, mlp_width, training.vit_dropout, training.vit_attention_dropout),
        num_classes=classes,
        representation_size=training.vit_representation_size,
    )
    if channels != 3:
        library_models.replace_stem(model, channels)
    if training.optimizer == "lamb":
        # LAMB's steps are proportional to the norm of the weight: an output layer of zeros, as torchvision's, stays so.
        nn.init.xavier_normal_(model.heads.head.weight)
    if is_small:
        # As large as the patch embeddings: from the usual 0.02 a small network does not learn positions on little data.
        nn.init.normal_(model.encoder.pos_embedding, std=_POSITIONS_STD)
    network: nn.Module = model
    return network


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm with constant statistics, scale and shift: buffers with the names and values of `norm`'s.

    Without loaded weights (mean 0, variance 1) it is the identity; it is for fine-tuning.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            held = getattr(norm, name)  # None with affine=False or track_running_stats=False
            fixed = torch.full((norm.num_features,), value) if held is None else held.detach().clone()
            self.register_buffer(name, fixed)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [n, channels, h, w] to the same shape."""
        scale = self.weight * torch.rsqrt(self.running_var + self.eps)
        shift = self.bias - self.running_mean * scale
        scale, shift = scale.to(inputs.dtype), shift.to(inputs.dtype)  # float32 with half activations in 16.32
        return inputs * scale[:, None, None] + shift[:, None, None]


def replace_batch_norms(network: nn.Module, training: TrainingSection) -> None:
    """Replace every `nn.BatchNorm2d` of a network, in place, by the layer of `training.norm`.

    Those of timm contain the activation, which stays after the layer.

    Raises:
        ConfigError: the network has none.
    """
    found = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.BatchNorm2d)
    ]
    if not found:
        raise ConfigError(f"--norm {training.norm}: the model has no BatchNorm2d to replace")
    for parent, name, child in found:
        is_group = training.norm == "group"
        new: nn.Module = _group_norm(child.num_features, training) if is_group else FrozenBatchNorm2d(child)
        contained = [getattr(child, part) for part in ("drop", "act") if hasattr(child, part)]
        setattr(parent, name, nn.Sequential(new, *contained) if contained else new)


def _group_norm(channels: int, training: TrainingSection) -> nn.GroupNorm:
    """Return a norm of 32 groups, or as configured; of fewer if the number does not divide `channels`."""
    groups = math.gcd(training.norm_num_groups or _GROUPS, channels)
    return nn.GroupNorm(groups, channels, training.norm_eps or _EPS)


_EFFICIENTNETS: Dict[str, Tuple[float, float, float]] = {  # factors of width and depth, and dropout
    "efficientnet_b0": (1.0, 1.0, 0.2),
    "efficientnet_b4": (1.4, 1.8, 0.4),
}
# Kernel, stride, input and output channels, layers of the stages; the first one does not expand its channels.
_STAGES = (
    *((3, 1, 32, 16, 1), (3, 2, 16, 24, 2), (5, 2, 24, 40, 2), (3, 2, 40, 80, 3)),
    *((5, 1, 80, 112, 3), (5, 2, 112, 192, 4), (3, 1, 192, 320, 1)),
)


def build_torchvision(training: TrainingSection, channels: int, classes: int) -> nn.Module:
    """Return the network `training.model`. ConfigError if its channels cannot be grouped as configured."""
    network: nn.Module
    if training.model in _EFFICIENTNETS:
        network = _efficientnet(training, classes)
        _group_depthwise(network, training.efficientnet_group_dim)
    else:
        network = getattr(library_models.torchvision_models(), training.model)(num_classes=classes)
    if channels != 3:
        library_models.replace_stem(network, channels)
    return network


def _efficientnet(training: TrainingSection, classes: int) -> nn.Module:
    """Return torchvision's network, with another expansion than 6 of the channels within blocks if configured."""
    library = library_models.torchvision_models().efficientnet
    width, depth, dropout = _EFFICIENTNETS[training.model]
    ratios = [1, *[training.efficientnet_expand_ratio] * (len(_STAGES) - 1)]
    stage = functools.partial(library.MBConvConfig, width_mult=width, depth_mult=depth)
    stages = [stage(ratio, *sizes) for ratio, sizes in zip(ratios, _STAGES)]
    network: nn.Module = library.EfficientNet(stages, dropout, num_classes=classes)
    return network


def _group_depthwise(network: nn.Module, size: int) -> None:
    """Replace the depthwise convolutions of a network, in place, by convolutions of groups of `size` channels."""
    if size == 1:
        return
    found = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Conv2d) and child.groups == child.in_channels > 1
    ]
    for parent, name, child in found:
        count, groups = child.in_channels, max(child.in_channels // size, 1)
        if count % groups:
            raise ConfigError(f"--efficientnet-group-dim {size}: the {count} channels of a block are no multiple of it")
        kernel: Any = child.kernel_size
        new = nn.Conv2d(count, count, kernel, child.stride, child.padding, groups=groups, bias=False)  # type: ignore[arg-type]
        nn.init.kaiming_normal_(new.weight, mode="fan_out")  # as torchvision's
        setattr(parent, name, new)


def build_timm(name: str, channels: int, classes: int) -> nn.Module:
    """Return the network of timm for `timm:NAME`. ConfigError as `timm_with`."""
    network: nn.Module = timm_with(name).create_model(
        name[len(TIMM) :], pretrained=False, num_classes=classes, in_chans=channels
    )
    return network


def timm_with(name: str) -> Any:
    """Return the package timm. ConfigError if it is not installed, or does not know the model `timm:NAME`."""
    torchvision_import.install()
    if importlib.util.find_spec("timm") is None:
        raise ConfigError(f"--model {name} needs the package timm on every host: pip install timm")
    timm: Any = importlib.import_module("timm")
    model = name[len(TIMM) :]
    if not timm.is_model(model):
        near = nearest(model, timm.list_models(), count=3)
        hint = f"; did you mean {' or '.join(TIMM + each for each in near)}?" if near else ""
        raise ConfigError(f"--model {name}: timm {timm.__version__} has no such model{hint}")
    return timm


class TaskNetwork:
    """Calls `run`, which prepares the inputs of the network; everything else is that of the module.

    So `network.parameters()`, `network.head` and `network[0]` work, as for a term of the loss. A module in it that is
    called on its own gets its inputs as they are.
    """

    __slots__ = ("_module", "_run")

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the network."""
        return self._run(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __getitem__(self, index: Any) -> Any:
        module: Any = self._module
        return module[index]
