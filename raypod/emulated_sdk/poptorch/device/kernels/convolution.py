"""2-D convolutions of channels_last tensors by other kernels, where those are faster than torch's.

torch's convolution reorders the weights in every call, and multiplies with all of the kernel even where it only meets
padding. Where an output has few positions and the weights are large, as in the last layers of a network for small
images, that is most of the time. In channels_last, weights are a matrix as they are, and so are the windows of the
input: they are copied into rows, without those parts of the kernel that only meet padding, and multiplied. 3x3
convolutions with more positions take Winograd's algorithm (winograd.py).

The choice depends on shapes only, so every replica computes the same bits.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poptorch.device.kernels import accumulates, are_enabled, winograd

# Weights per output position from which a product is faster (measured on one core with AVX-512, fp32).
_WEIGHTS_PER_POSITION = 2048


class _Axis(NamedTuple):
    """One spatial axis of a convolution, with the used part `low:high` of the kernel.

    `before` and `after` are the padding that this part needs.
    """

    low: int
    high: int
    stride: int
    before: int
    after: int
    outputs: int

    @property
    def taps(self) -> int:
        """The size of the used part of the kernel."""
        return self.high - self.low

    @property
    def is_direct(self) -> bool:
        """Whether output i depends on input i only."""
        return (self.taps, self.stride, self.before, self.after) == (1, 1, 0, 0)


def _axis(size: int, kernel: int, stride: int, padding: int) -> _Axis:
    outputs = (size + 2 * padding - kernel) // stride + 1
    low, high = max(0, padding - (outputs - 1) * stride), min(kernel, size + padding)
    before = padding - low
    after = max(0, (outputs - 1) * stride + (high - low) - size - before)
    return _Axis(low, high, stride, before, after, outputs)


def specialize(module: nn.Module) -> None:
    """Let the 2-D convolutions of a replica's module choose their kernel, also in submodules.

    Those with groups, dilation or another padding than zeros keep torch's, and so do subclasses, and all if
    EMULATED_POD_KERNELS switches the device's kernels off.
    """
    for each in module.modules() if are_enabled() else ():
        if type(each) is nn.Conv2d and _is_plain(each):
            each._conv_forward = types.MethodType(_conv_forward, each)  # type: ignore[method-assign]


def _is_plain(layer: nn.Conv2d) -> bool:
    is_padded_by_numbers = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return layer.groups == 1 and layer.dilation == (1, 1) and is_padded_by_numbers


def _conv_forward(
    self: nn.Conv2d, inputs: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    if _is_candidate(inputs, weight):
        axes = _product_axes(self, inputs, weight)
        if axes is not None:
            product: torch.Tensor = _Product.apply(inputs, weight, bias, *axes)  # type: ignore[no-untyped-call]
            return product
        if _is_3x3(self) and winograd.is_faster(inputs, weight):
            return winograd.convolve(inputs, weight, bias)
    of_torch: torch.Tensor = nn.Conv2d._conv_forward(self, inputs, weight, bias)
    return of_torch


def _is_candidate(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a kernel other than torch's can compute a convolution of these tensors."""
    is_single = inputs.dim() == 4 and inputs.dtype == weight.dtype == torch.float32
    return is_single and inputs.shape[1] == weight.shape[1] and _is_channels_last(inputs, weight)


def _is_3x3(layer: nn.Conv2d) -> bool:
    return (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))


def _product_axes(layer: nn.Conv2d, inputs: torch.Tensor, weight: torch.Tensor) -> Optional[Tuple[_Axis, _Axis]]:
    """Return the axes of a convolution to compute as a product; None where torch's kernel is to be used."""
    sizes = zip(inputs.shape[2:], layer.kernel_size, layer.stride, map(int, layer.padding))
    rows, columns = (_axis(*each) for each in sizes)
    if min(rows.outputs, columns.outputs) < 1:
        return None  # torch raises its error
    positions = inputs.shape[0] * rows.outputs * columns.outputs
    if weight.numel() >= _WEIGHTS_PER_POSITION * positions:
        return rows, columns
    return None


def _is_channels_last(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch's convolution would return a channels_last tensor."""
    is_ambiguous = inputs.is_contiguous()
    return not weight.is_contiguous() or (not is_ambiguous and inputs.is_contiguous(memory_format=torch.channels_last))


class _Product(torch.autograd.Function):
    """A convolution of float32 inputs [n, c, h, w] with weights [o, c, kh, kw] by matrix products."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], rows: _Axis, columns: _Axis
    ) -> torch.Tensor:
        images = inputs.permute(0, 2, 3, 1).contiguous()
        matrix = _used(weight, rows, columns).reshape(weight.shape[0], -1)
        windows = _windows(images, rows, columns)
        outputs = windows.mm(matrix.t()) if bias is None else torch.addmm(bias, windows, matrix.t())
        ctx.save_for_backward(windows, weight, matrix)
        ctx.shape, ctx.rows, ctx.columns, ctx.has_bias = images.shape, rows, columns, bias is not None
        return outputs.view(images.shape[0], rows.outputs, columns.outputs, -1).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        windows, weight, matrix = ctx.saved_tensors
        rows, columns = ctx.rows, ctx.columns
        gradients = gradient.permute(0, 2, 3, 1).reshape(-1, weight.shape[0])
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = _add_windows(gradients.mm(matrix), ctx.shape, rows, columns).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            if accumulates(weight):
                _accumulate(weight, gradients, windows, rows, columns)
            else:
                of_weight = _weight_gradient(weight, gradients, windows, rows, columns)
        of_bias = gradients.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias, None, None


def _weight_gradient(
    weight: torch.Tensor, gradients: torch.Tensor, windows: torch.Tensor, rows: _Axis, columns: _Axis
) -> torch.Tensor:
    """Return the gradient of weights [o, c, kh, kw], with the strides of channels_last weights."""
    used = gradients.t().mm(windows).view(weight.shape[0], rows.taps, columns.taps, -1)
    if used.numel() != weight.numel():
        result = torch.zeros_like(weight)
        _used(result, rows, columns).copy_(used)
        return result
    is_in_both_formats = weight.shape[2:] == (1, 1)
    return used.view(weight.shape) if is_in_both_formats else used.permute(0, 3, 1, 2)


def _accumulate(
    weight: torch.Tensor, gradients: torch.Tensor, windows: torch.Tensor, rows: _Axis, columns: _Axis
) -> None:
    """Add the gradient of a leaf to its `grad`."""
    total = weight.grad
    if total is None:
        weight.grad = _weight_gradient(weight, gradients, windows, rows, columns)
    elif _used(total, rows, columns).is_contiguous():
        _used(total, rows, columns).view(weight.shape[0], -1).addmm_(gradients.t(), windows)
    else:
        used = gradients.t().mm(windows).view(weight.shape[0], rows.taps, columns.taps, -1)
        _used(total, rows, columns).add_(used)


def _used(weight: torch.Tensor, rows: _Axis, columns: _Axis) -> torch.Tensor:
    """Return a view of the used part of weights [o, c, kh, kw]: [o, taps of rows, taps of columns, c]."""
    return weight.permute(0, 2, 3, 1)[:, rows.low : rows.high, columns.low : columns.high]


def _windows(images: torch.Tensor, rows: _Axis, columns: _Axis) -> torch.Tensor:
    """Return the windows of images [n, h, w, c] as a matrix [n * outputs, taps * c]."""
    samples, _, _, channels = images.shape
    if rows.is_direct and columns.is_direct:
        return images.view(-1, channels)
    if rows.before or rows.after or columns.before or columns.after:
        images = functional.pad(images, (0, 0, columns.before, columns.after, rows.before, rows.after))
    sample, row, column, _ = images.stride()
    # The taps of a row and their channels are adjacent.
    shape = (samples, rows.outputs, columns.outputs, rows.taps, columns.taps * channels)
    strides = (sample, rows.stride * row, columns.stride * column, row, 1)
    return images.as_strided(shape, strides).reshape(samples * rows.outputs * columns.outputs, -1)


def _add_windows(windows: torch.Tensor, shape: torch.Size, rows: _Axis, columns: _Axis) -> torch.Tensor:
    """Return images of shape [n, h, w, c] to which the windows of a matrix as of `_windows` are added, tap by tap."""
    samples, height, width, channels = shape
    if rows.is_direct and columns.is_direct:
        return windows.view(shape)
    parts = windows.view(samples, rows.outputs, columns.outputs, rows.taps, columns.taps, channels)
    padded = windows.new_zeros(
        samples, height + rows.before + rows.after, width + columns.before + columns.after, channels
    )
    for row in range(rows.taps):
        rows_met = slice(row, row + (rows.outputs - 1) * rows.stride + 1, rows.stride)
        for column in range(columns.taps):
            columns_met = slice(column, column + (columns.outputs - 1) * columns.stride + 1, columns.stride)
            padded[:, rows_met, columns_met] += parts[:, :, :, row, column]
    return padded[:, rows.before : rows.before + height, columns.before : columns.before + width]
