"""EfficientNet (Tan and Le 2019) and MobileNet v3 (Howard et al. 2019) of torchvision, and models of timm by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Dict, Tuple

from torch import nn

from raypod.errors import ConfigError
from raypod.plan.config import TIMM, TrainingSection
from raypod.system import torchvision_import
from raypod.system.command_line import nearest

_EFFICIENTNETS: Dict[str, Tuple[float, float, float]] = {  # factors of width and depth, and dropout
    "efficientnet_b0": (1.0, 1.0, 0.2),
    "efficientnet_b4": (1.4, 1.8, 0.4),
}
# Kernel, stride, input and output channels, layers of the stages; the first one does not expand its channels.
_STAGES = (
    *((3, 1, 32, 16, 1), (3, 2, 16, 24, 2), (5, 2, 24, 40, 2), (3, 2, 40, 80, 3)),
    *((5, 1, 80, 112, 3), (5, 2, 112, 192, 4), (3, 1, 192, 320, 1)),
)


def build(training: TrainingSection, channels: int, classes: int) -> nn.Module:
    """Return the network `training.model`. ConfigError if its channels cannot be grouped as configured."""
    torchvision_import.install()
    import torchvision  # takes a second, which the default model does not need

    network: nn.Module
    if training.model in _EFFICIENTNETS:
        network = _efficientnet(training, classes)
        _group_depthwise(network, training.efficientnet_group_dim)
    else:
        network = getattr(torchvision.models, training.model)(num_classes=classes)
    if channels != 3:
        stem: Any = network.get_submodule("features.0")
        stem[0] = nn.Conv2d(channels, stem[0].out_channels, 3, 2, 1, bias=False)
    return network


def _efficientnet(training: TrainingSection, classes: int) -> nn.Module:
    """Return torchvision's network, with another expansion than 6 of the channels within blocks if configured."""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    width, depth, dropout = _EFFICIENTNETS[training.model]
    ratios = [1, *[training.efficientnet_expand_ratio] * (len(_STAGES) - 1)]
    stage = functools.partial(MBConvConfig, width_mult=width, depth_mult=depth)
    stages = [stage(ratio, *sizes) for ratio, sizes in zip(ratios, _STAGES)]
    network: nn.Module = EfficientNet(stages, dropout, num_classes=classes)
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
    """Return the network of timm for `timm:NAME`. ConfigError as `check_timm`."""
    network: nn.Module = _timm(name).create_model(
        name[len(TIMM) :], pretrained=False, num_classes=classes, in_chans=channels
    )
    return network


def check_timm(name: str) -> None:
    """Raise ConfigError if timm is not installed, or does not know the model `timm:NAME`."""
    _timm(name)


def _timm(name: str) -> Any:
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
