"""The memory format of convolution weights and activations on the emulated device.

EMULATED_POD_MEMORY_FORMAT is `auto` (default), `contiguous` or `channels_last`. `auto` depends only on the model and
its forward, so all processes choose the same: `channels_last` for a model with many weights in 2-D convolutions in
float32, unless its forward takes a view that only contiguous activations have. On an IPU the compiler chooses every
layout.
"""

from __future__ import annotations

import os
from typing import Callable, Dict, FrozenSet, Mapping, Tuple, TypeVar

import torch
from _pod.activation import MEMORY_FORMAT as VARIABLE

from poptorch.device.compile.compilation import Trace
from poptorch.errors import Error

AUTO, CONTIGUOUS, CHANNELS_LAST = "auto", "contiguous", "channels_last"
_Memory = TypeVar("_Memory")
# Weights in 2-D convolutions from which `auto` chooses channels_last. Smaller models gain nothing (measured on one
# core), and in contiguous compute the bits of plain torch.
_MANY_WEIGHTS = 1 << 20
_FORMATS = (AUTO, CONTIGUOUS, CHANNELS_LAST)


def requested() -> str:
    """Return the format that the environment requests. Raises Error if it is none of the three."""
    value = os.environ.get(VARIABLE) or AUTO
    if value not in _FORMATS:
        raise Error(f"{VARIABLE}={value!r} is no memory format; set it to {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    return value


def convolution_weights(model: torch.nn.Module, grouped: Mapping[str, object]) -> Dict[str, int]:
    """Return the names and sizes of the weights that `channels_last` stores in that format: those of 2-D convolutions.

    Args:
        grouped: the parameters of which groups of replicas have their own values; they stay contiguous.
    """
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Conv2d)}
    named = model.named_parameters()
    return {name: tensor.numel() for name, tensor in named if id(tensor) in convolutions and name not in grouped}


def choose(
    weights: Mapping[str, int], compiled: Callable[[FrozenSet[str]], Tuple[_Memory, Trace]]
) -> Tuple[_Memory, Trace]:
    """Compile a model in the requested format.

    Args:
        weights: its `convolution_weights`.
        compiled: compiles the model with these weights in channels_last, the others contiguous.

    Raises:
        Error: the request is unknown, or the forward does not run in channels_last, which is requested.
    """
    request = requested()
    is_small = request == AUTO and sum(weights.values()) < _MANY_WEIGHTS
    if not weights or is_small or request == CONTIGUOUS:
        return compiled(frozenset())
    try:
        memory, traced = compiled(frozenset(weights))
    except RuntimeError as error:
        if not _is_view_error(error):
            raise
        if request == CHANNELS_LAST:
            raise Error(
                f"{VARIABLE}={request}: forward takes a view that only contiguous activations have. Use reshape or "
                f"flatten instead of view, or the memory format {AUTO} or {CONTIGUOUS}"
            ) from error
        return compiled(frozenset())
    if request == AUTO and traced.has_half:  # operators on half are conversions mostly
        return compiled(frozenset())
    return memory, traced


def _is_view_error(error: RuntimeError) -> bool:
    """Return whether torch raised this error for a view that the strides of channels_last do not allow."""
    return "view size is not compatible with input tensor's size and stride" in str(error)
