"""Classifiers of torchvision by name, and how images are prepared for them and for models of transformers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.func import functional_call

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import HF_IMAGES, TORCHVISION, Config
from raypod.system import torchvision_import
from raypod.system.command_line import nearest
from raypod.training.data.arrays import Splits
from raypod.training.data.hf_folder import HfFolder
from raypod.training.data.registry import image_shape

# Arguments of a constructor that depend on the images, or that change what a network returns in training.
_ARGUMENTS = {"googlenet": {"aux_logits": False, "init_weights": True}}
_ARGUMENTS["inception_v3"] = _ARGUMENTS["googlenet"]


class Preprocessing(NamedTuple):
    """How images are prepared for a model: height and width, and mean and std of images scaled to [0, 1]."""

    side: Optional[int]
    mean: Tuple[float, ...]
    std: Tuple[float, ...]


def build_torchvision(name: str, channels: int, side: int, classes: int) -> nn.Module:
    """Return the classifier `torchvision:NAME` for images [channels, side, side], with its initial weights.

    Raises:
        ConfigError: as `check_torchvision`, or the network does not fit the images.
    """
    models, own = torchvision_models(), _own(name)
    arguments: Dict[str, Any] = dict(_ARGUMENTS.get(own, {}))
    if own.startswith("vit_"):
        arguments["image_size"] = side
    if own.startswith("maxvit"):
        arguments["input_size"] = (side, side)
    with user_code.reported(f"--model {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about arguments of other constructors
        network: nn.Module = models.get_model(own, weights=None, num_classes=classes, **arguments)
    if channels != 3:
        replace_stem(network, channels)
    return network


def replace_stem(network: nn.Module, channels: int) -> None:
    """Let the first convolution of a network have other input channels than 3."""
    name, stem = next((name, part) for name, part in network.named_modules() if isinstance(part, nn.Conv2d))
    sizes: Any = {each: getattr(stem, each) for each in ("out_channels", "kernel_size", "stride", "padding")}
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, nn.Conv2d(channels, **sizes, bias=stem.bias is not None))


def check_torchvision(name: str) -> None:
    """Raise ConfigError if torchvision has no classifier `torchvision:NAME`."""
    models, own = torchvision_models(), _own(name)
    known = models.list_models(module=models)  # without those of the modules for detection, segmentation and others
    if own not in known:
        near = nearest(own, known, count=3)
        hint = f"; did you mean {' or '.join(TORCHVISION + each for each in near)}?" if near else ""
        raise ConfigError(f"--model {name}: torchvision has no such classifier{hint}")


def check_size(network: nn.Module, name: str, channels: int, side: int) -> None:
    """Raise ConfigError if a network cannot be computed for images [channels, side, side], and can for its own size.

    On the meta device, which computes shapes only.
    """
    if name.startswith(TORCHVISION):
        stated = int(torchvision_models().get_model_weights(_own(name)).DEFAULT.transforms().crop_size[0])
    else:
        stated = (getattr(network, "default_cfg", None) or {}).get("input_size", (0, 0, 0))[-1]
    if side < stated:
        failure = _failure(network, channels, side)
        if failure and not _failure(network, channels, stated):
            what = f"--model {name} cannot be computed for images of {side} x {side} pixels ({failure})"
            raise ConfigError(f"{what}: use a larger --image-size; its own is {stated}")


def _failure(network: nn.Module, channels: int, side: int) -> str:
    """Return the error of a network for an image of a size, in one line; "" if there is none."""
    tensors = (*network.named_parameters(), *network.named_buffers())
    state = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors}
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            functional_call(network, state, (torch.empty(1, channels, side, side, device="meta"),))
    except RuntimeError as error:
        return " ".join(str(error).split())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return ""


def preprocessing_of(config: Config) -> Optional[Preprocessing]:
    """Return how images are prepared for the weights of a config's model; None if the model has no such statement."""
    name = config.training.model
    if config.task.name == HF_IMAGES:
        return _of_folder(HfFolder(config))
    if not name.startswith(TORCHVISION):
        return None
    stated = torchvision_models().get_model_weights(_own(name)).DEFAULT.transforms()
    return Preprocessing(int(stated.crop_size[0]), tuple(stated.mean), tuple(stated.std))


def _of_folder(folder: HfFolder) -> Optional[Preprocessing]:
    """Return how a folder of transformers prepares images."""
    stated, side = folder.preprocessor(), folder.config.get("image_size")
    sizes = stated.get("crop_size"), stated.get("size")
    for size in (each for each in sizes if side is None and each is not None):
        side = (
            next((size[key] for key in ("height", "shortest_edge") if key in size), None)
            if isinstance(size, dict)
            else size
        )
    mean, std = stated.get("image_mean"), stated.get("image_std")
    statistics = (tuple(mean), tuple(std)) if mean and std else ((), ())
    return Preprocessing(side if isinstance(side, int) else None, *statistics)


def with_image_size(config: Config) -> Config:
    """Return the config with the image size of its model's preprocessing, unless `data.image_size` is given."""
    prepared = preprocessing_of(config) if config.data.image_size is None else None
    if prepared is None or prepared.side is None:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"image_size": prepared.side})})


def with_statistics(config: Config, splits: Splits) -> Splits:
    """Return the splits with mean and std of the model's preprocessing, if its images have as many channels."""
    prepared = preprocessing_of(config)
    if prepared is None or len(prepared.mean) not in (1, image_shape(config).channels):
        return splits
    return dataclasses.replace(splits, mean=prepared.mean, std=prepared.std)


def _own(name: str) -> str:
    return name[len(TORCHVISION) :]


def torchvision_models() -> Any:
    """Return `torchvision.models`, whose import takes a second, which the default model does not need."""
    torchvision_import.install()
    import torchvision

    return torchvision.models
