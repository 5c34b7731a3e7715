"""`module_repr` and `print`: modules as text, with the blocks that `BeginBlock` added."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from poptorch.parallel.blocks import block_of

__all__ = ["module_repr", "print"]


def module_repr(m: torch.nn.Module) -> str:
    """Return `repr(m)`, with `BeginBlock(...)` before each module that starts a block, and its other pre-hooks."""
    extra = m.extra_repr().split("\n") if m.extra_repr() else []
    children = [f"({name}): " + module_repr(child).replace("\n", "\n  ") for name, child in m.named_children()]
    block = block_of(m)
    prefix = "" if block is None else f"BeginBlock(user_id={block[0]}, ipu_id={block[1]}) "
    prefix += "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    lines = [*extra, *children]
    is_short = not lines or len(lines) == len(extra) == 1
    body = "".join(lines) if is_short else "\n  " + "\n  ".join(lines) + "\n"
    return f"{prefix}{m._get_name()}({body})"  # type: ignore[no-untyped-call]


def print(m: Any) -> None:
    """Print a module with its blocks; anything else as the built-in `print`."""
    builtins.print(module_repr(m) if isinstance(m, torch.nn.Module) else m)  # noqa: T201
