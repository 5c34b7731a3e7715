"""`ipu_print_tensor`: prints a tensor and its gradient whenever the model runs (contract 2.6)."""

from __future__ import annotations

import sys

import torch

from poptorch._device.mode import compiling_mode, is_on_device, off_device
from poptorch._ops.arguments import checked_tensor
from poptorch._ops.print_format import PrintFormat


def ipu_print_tensor(  # noqa: PLR0913  # the SDK's signature
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """The same values; each replica writes them to stderr at every execution on the device. Use the returned tensor.

    title: written before the values; the gradient, of the same shape, comes as "<title>_gradient" [inferred].
    print_gradient: whether the gradient is written in the backward pass.
    summarise_threshold, edge_items: with more elements than that, only so many at each edge of a dimension are written.
    max_line_width: characters in a line. digits: after the decimal point.
    float_format: "auto", "fixed", "scientific" or "none" (all digits).
    separator, open_bracket, close_bracket: between values, and around each dimension.

    On the host it writes nothing, as nothing does while a model is compiled. ValueError for formats other than these.
    """
    checked_tensor("ipu_print_tensor", "tensor", tensor)
    layout = PrintFormat(
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator, open_bracket, close_bracket
    )
    layout.check()
    printed = tensor.clone()
    if is_on_device() and compiling_mode() is None:
        _write(title or "print_tensor", tensor, layout)
        if print_gradient and printed.requires_grad:
            printed.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _write(f"{title or 'print_tensor'}_gradient", gradient, layout)
            )
    return printed


def _write(title: str, tensor: torch.Tensor, layout: PrintFormat) -> None:
    with off_device(), torch.no_grad():
        # In one piece: the replicas write side by side.
        sys.stderr.write(f"{title}: {layout.text(tensor.detach())}\n")
        sys.stderr.flush()
