"""`torch.ops.poptorch`: the operators that PopTorch registers with torch, with their argument orders.

They are Python functions of the public ops, not operators of torch's dispatcher, so they have no overloads. The
operators that delimit the parts of loops, branches, blocks and layers on the host are missing: they act on PopTorch's
compiler. Use `poptorch.for_loop`, `cond`, `Block` and `CPU`.
"""

from __future__ import annotations

import sys
from typing import Sequence

import torch

from poptorch.custom_operators.registry import custom_operation
from poptorch.device_mode import is_on_device
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import Error
from poptorch.ops.algorithms import ctc_beam_search_decoder, fps, nearest
from poptorch.ops.annotations import (
    NameScope,
    checked_tensor,
    marked_loss,
    nop,
    recomputationCheckpoint,
    set_available_memory,
)
from poptorch.ops.annotations import set_overlap_for_input as _overlap_input
from poptorch.ops.annotations import set_overlap_for_output as _overlap_output
from poptorch.ops.control import dynamic_slice, dynamic_update
from poptorch.ops.host import FLOAT_FORMATS
from poptorch.ops.host import ipu_print_tensor as _print_tensor

__all__ = [
    "ctc_beam_search_decoder",
    "custom_operation",
    "dynamic_slice",
    "dynamic_update",
    "fps",
    "identity_loss",
    "internal_cast",
    "ipu_print_tensor",
    "nearest",
    "nearest_batch_list",
    "nop",
    "pop_name_scope",
    "push_name_scope",
    "recomputation_checkpoint",
    "set_available_memory",
    "set_matmul_serialization",
    "set_overlap_for_input",
    "set_overlap_for_output",
]


def identity_loss(x: torch.Tensor, reduction: int) -> torch.Tensor:
    """As `poptorch.identity_loss`, with the number of the reduction: 0 sum, 1 mean, 2 none."""
    return marked_loss(x, reduction)


def push_name_scope(name: str) -> None:
    """Begin a scope that names operators in profiles; like `NameScope`, it has no effect here."""
    NameScope(name)


def pop_name_scope() -> None:
    """End the scope of the last `push_name_scope`."""


def internal_cast(self: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the tensor cast to "FLOAT" or "FLOAT16" on the device; Error for another type.

    On the host, as in the SDK, "FLOAT16" casts to float32 and "FLOAT" returns the tensor itself.
    """
    checked_tensor("internal_cast", "self", self)
    if dtype not in ("FLOAT", "FLOAT16"):
        raise Error(f"torch.ops.poptorch.internal_cast: expected 'FLOAT' or 'FLOAT16', got {dtype!r}")
    if is_on_device():
        return self.half() if dtype == "FLOAT16" else self.float()
    return self.float() if dtype == "FLOAT16" else self


def recomputation_checkpoint(self: torch.Tensor) -> torch.Tensor:
    """Return `poptorch.recomputationCheckpoint` of one tensor."""
    checkpoint: torch.Tensor = recomputationCheckpoint(self)
    return checkpoint


def set_matmul_serialization(matmul: torch.Tensor, mode: str, factor: int, keep_precision: bool) -> torch.Tensor:
    """Compute the matrix product `matmul` in `factor` parts; no effect here. ValueError for an unknown mode."""
    MatMulSerializationMode(mode)
    return nop(matmul)


def set_overlap_for_input(t: torch.Tensor, mode: str) -> torch.Tensor:
    """Return `poptorch.set_overlap_for_input` of one tensor; `mode` is the value of an `OverlapMode`."""
    overlapped: torch.Tensor = _overlap_input(t, OverlapMode(mode))
    return overlapped


def set_overlap_for_output(t: torch.Tensor, mode: str) -> torch.Tensor:
    """Return `poptorch.set_overlap_for_output` of one tensor; `mode` is the value of an `OverlapMode`."""
    overlapped: torch.Tensor = _overlap_output(t, OverlapMode(mode))
    return overlapped


def ipu_print_tensor(  # noqa: PLR0913  # the SDK's signature
    self: torch.Tensor,
    title: str,
    print_gradient: int,
    summarize_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: int,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> torch.Tensor:
    """Return `poptorch.ipu_print_tensor`; the float format is a number: 0 auto, 1 fixed, 2 scientific, 3 none."""
    return _print_tensor(
        self,
        title,
        bool(print_gradient),
        summarize_threshold,
        edge_items,
        max_line_width,
        digits,
        FLOAT_FORMATS[float_format],
        separator,
        open_bracket,
        close_bracket,
    )


def nearest_batch_list(
    x: torch.Tensor, y: torch.Tensor, batch_x: Sequence[int], batch_y: Sequence[int]
) -> torch.Tensor:
    """Return `poptorch.nearest` for batches given as lists."""
    return nearest(x, y, list(batch_x), list(batch_y))


# Not through torch.library: a function mode is off inside a registered operator, and the device's is one.
torch.ops.poptorch = sys.modules[__name__]  # type: ignore[attr-defined]
