"""The section `ipu` in a PopTorch program: the calls on `poptorch.Options`, and the marks in its network."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any, Sequence

import poptorch
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan import ipu_options
from raypod.plan.config import Config
from raypod.system.command_line import nearest


def make_calls(options: Any, config: Config, is_training: bool = True) -> None:
    """Make the calls of `ipu_options.calls_of` on `poptorch.Options`; for the evaluation those that are not its own."""
    for call in ipu_options.calls_of(config):
        if is_training or not call.is_for_training:
            setter = functools.reduce(getattr, call.setter.split("."), options)
            setter(*map(_argument, call.arguments))


def keep_outputs(network: nn.Module, patterns: Sequence[str]) -> None:
    """Mark the outputs of the modules whose names match as checkpoints of a recomputation.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names = [name for name, _ in network.named_modules() if name]
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            similar = nearest(pattern, names, 3) or names[:5]
            flag = f"--recomputation-checkpoints {pattern}"
            raise ConfigError(f"{flag} matches no module of the network; there are {', '.join(similar)}")
        for name in found:
            network.get_submodule(name).register_forward_hook(_keep_output)


def overlap_mode(config: Config) -> Any:
    """Return the `poptorch.OverlapMode` of inputs and outputs in training; None for transfers that do not overlap."""
    modes = {
        "accumulation-loop": poptorch.OverlapMode.OverlapAccumulationLoop,
        "device-iteration-loop": poptorch.OverlapMode.OverlapDeviceIterationLoop,
    }
    return modes.get(config.ipu.overlap_io or "")


def _keep_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    if not module.training or output is None:
        return output
    if isinstance(output, (list, tuple)):  # one by one: of a list of one tensor, the SDK gives the list of its rows
        return type(output)(_keep_output(module, inputs, each) for each in output)
    return poptorch.recomputationCheckpoint(output)


def _argument(value: Any) -> Any:
    """Return an argument of a call as PopTorch takes it: plain values as they are."""
    if isinstance(value, ipu_options.Location):
        location = poptorch.TensorLocationSettings()
        for setter, setting in value.settings.items():
            getattr(location, setter)(setting)
        return location
    is_dtype = isinstance(value, str) and value.startswith(ipu_options.TORCH)
    return getattr(torch, value[len(ipu_options.TORCH) :]) if is_dtype else value
