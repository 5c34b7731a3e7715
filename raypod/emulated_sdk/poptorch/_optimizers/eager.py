"""torch's optimizers without torch's compiler.

Newer torch imports `torch._dynamo` at the first call of most methods of an optimizer, to tell the compiler to leave
them alone. The import takes more than a second in every process, and a device that never compiles has no use for it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

_MARK = "__dynamo_disable"  # where torch._compile keeps the function to call instead, once it has asked the compiler


def keep_compiler_out() -> None:
    """Let torch.optim.Optimizer's methods run as they are, unless this process uses the compiler already."""
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        original = getattr(method, "__wrapped__", None)
        if original is not None and not hasattr(original, _MARK):
            setattr(original, _MARK, original)


def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without its wrappers for profilers and for the compiler."""
    plain: Any = inspect.unwrap(type(optimizer).step)
    with torch.no_grad():
        plain(optimizer)
