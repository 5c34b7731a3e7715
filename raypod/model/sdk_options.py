"""Makes the calls of the section `ipu` on `poptorch.Options`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from raypod.plan import ipu_options
from raypod.plan.config import Config


def make_calls(options: Any, config: Config, is_training: bool = True) -> None:
    """Make the calls of `ipu_options.calls_of` on `poptorch.Options`; for the evaluation those that are not its own."""
    for call in ipu_options.calls_of(config):
        if is_training or not call.is_for_training:
            setter = functools.reduce(getattr, call.setter.split("."), options)
            setter(*map(_argument, call.arguments))


def _argument(value: Any) -> Any:
    """Return an argument of a call: a dtype for its name, other values as they are."""
    is_dtype = isinstance(value, str) and value.startswith(ipu_options.TORCH)
    return getattr(torch, value[len(ipu_options.TORCH) :]) if is_dtype else value
