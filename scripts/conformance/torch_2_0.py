"""What PopTorch's tests and torch_geometric use of torch 2.0, and newer versions have removed or changed."""

from __future__ import annotations

import typing
from typing import Any

import torch.fx._symbolic_trace as symbolic_trace
from torch.utils.data import Sampler


def restore() -> None:
    """Adds to the installed torch what it lacks."""
    if "__init__" not in vars(Sampler):
        Sampler.__init__ = _init_sampler  # type: ignore[method-assign]
    for name in typing.__all__:  # torch_geometric takes them from this module
        if not hasattr(symbolic_trace, name):
            setattr(symbolic_trace, name, getattr(typing, name))


def _init_sampler(self: Sampler[Any], data_source: Any = None) -> None:
    del data_source  # torch 2.0 ignores it, too
