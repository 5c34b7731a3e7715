"""2-D convolutions of channels_last tensors by other kernels, where those are faster than torch's.

torch's convolution reorders the weights in every call, and multiplies with all of the kernel even where it only meets
padding. Where an output has few positions and the weights are large, as in the last layers of a network for small
images, that is most of the time. In channels_last, weights are a matrix as they are, and so are the windows of the
input: they are copied into rows, without those parts of the kernel that only meet padding, and multiplied. 3x3
convolutions with more positions take Winograd's algorithm, F(4x4, 3x3), in matrix products of torch.

Its output is computed in tiles of 4x4. Input tiles (6x6), weights (3x3) and output tiles are transformed by small
matrices to 36 points, at each of which the convolution is one matrix product over the channels: a quarter of the
multiplications of the sum over the window. In float32 the result differs from the exact one by about 2e-6 of its norm,
torch's by 5e-7. Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, has the matrices.

The images are processed in groups whose tiles fit into a core's cache. Kernels and groups depend on shapes only, so
every replica computes the same bits.
"""

from __future__ import annotations

import types
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poptorch.device.kernels import accumulates, are_enabled

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
        if _is_3x3(self) and is_faster_by_winograd(inputs, weight):
            return convolve_by_winograd(inputs, weight, bias)
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


_OUT, _IN = 4, 6  # sizes of an output and of an input tile
# Measured on one core with AVX-512: fewer tiles do not pay for the transformation of the weights, fewer channels not
# for that of the tiles, and outputs that fill their tiles less not for the positions that are computed in vain.
_LEAST_TILES = 32
_LEAST_CHANNELS = 64
_MOST_WASTE = 4 / 3
# The least columns (tiles x channels) and tiles of a group of images.
_GROUP_COLUMNS = 8192
_GROUP_TILES = 64


def _matrix(rows: List[List[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


_INPUT = _matrix(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
_OUTPUT = _matrix([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])
_KERNEL = _matrix(
    [[1 / 4, 0, 0], [-1 / 6] * 3, [-1 / 6, 1 / 6, -1 / 6], [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
)
_KERNELS = torch.kron(_KERNEL, _KERNEL)  # both axes at once: [36, 9]
_INPUT_BACKWARD, _OUTPUT_BACKWARD = _INPUT.t().contiguous(), _OUTPUT.t().contiguous()


class _Tiling(NamedTuple):
    """How images of shape [samples, height, width] are divided into tiles."""

    samples: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        return -(-self.height // _OUT)

    @property
    def columns(self) -> int:
        return -(-self.width // _OUT)

    @property
    def tiles(self) -> int:
        """Tiles per image."""
        return self.rows * self.columns

    @property
    def waste(self) -> float:
        """Computed positions per position of the output."""
        return self.tiles * _OUT * _OUT / (self.height * self.width)

    @property
    def beyond(self) -> Tuple[int, int]:
        """The rows and columns that the tiles have beyond the output."""
        return _OUT * self.rows - self.height, _OUT * self.columns - self.width

    def groups(self, channels: int) -> Iterator[slice]:
        """Yield the samples of each group, for a convolution with at most `channels` channels."""
        size = max(1, _GROUP_COLUMNS // (self.tiles * channels), -(-_GROUP_TILES // self.tiles))
        for first in range(0, self.samples, size):
            yield slice(first, min(first + size, self.samples))


def is_faster_by_winograd(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `convolve` is faster than torch's kernel, for a 3x3 kernel with stride 1 and padding 1."""
    samples, channels, height, width = inputs.shape
    tiling = _Tiling(samples, height, width)
    return (
        min(channels, weight.shape[0]) >= _LEAST_CHANNELS
        and samples * tiling.tiles >= _LEAST_TILES
        and tiling.waste <= _MOST_WASTE
    )


def convolve_by_winograd(inputs: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    """Return the convolution of float32 inputs [n, c, h, w] with weights [o, c, 3, 3], stride 1 and padding 1.

    Inputs, weights and result are channels_last.
    """
    is_kept = torch.is_grad_enabled() and weight.requires_grad
    result: torch.Tensor = _Winograd.apply(inputs, weight, bias, is_kept)  # type: ignore[no-untyped-call]
    return result


class _Winograd(torch.autograd.Function):
    """`convolve`; `is_kept` if the transformed inputs are kept for the gradient of the weights."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], is_kept: bool
    ) -> torch.Tensor:
        images = inputs.permute(0, 2, 3, 1).contiguous()
        tiling = _Tiling(*images.shape[:3])
        out_channels, channels = weight.shape[:2]
        kernels = _kernels(weight)
        outputs = images.new_empty(tiling.samples, tiling.rows, _OUT, tiling.columns, _OUT, out_channels)
        kept = []
        for group in tiling.groups(max(channels, out_channels)):
            points = _both_axes(_INPUT, _input_tiles(images[group], tiling)).view(_IN * _IN, -1, channels)
            products = torch.bmm(points, kernels.transpose(1, 2))
            tiles = _both_axes(_OUTPUT, products)
            by_tile = outputs[group].permute(2, 4, 0, 1, 3, 5)
            by_tile.copy_(tiles.view(by_tile.shape))
            if is_kept:
                kept.append(points)
        result = outputs.view(tiling.samples, _OUT * tiling.rows, _OUT * tiling.columns, out_channels)
        if any(tiling.beyond):
            result = result[:, : tiling.height, : tiling.width].contiguous()
        if bias is not None:
            result += bias
        ctx.save_for_backward(weight, kernels, *kept)
        ctx.tiling, ctx.has_bias = tiling, bias is not None
        return result.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        weight, kernels, *kept = ctx.saved_tensors
        tiling: _Tiling = ctx.tiling
        of_outputs = gradient.permute(0, 2, 3, 1).contiguous()
        out_channels, channels = weight.shape[:2]
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_inputs = _PaddedGradient(of_outputs, tiling, channels) if needs_inputs else None
        of_kernels: Optional[torch.Tensor] = None
        for index, group in enumerate(tiling.groups(max(channels, out_channels))):
            tiles = _output_tiles(of_outputs[group], tiling)
            of_products = _both_axes(_OUTPUT_BACKWARD, tiles).view(_IN * _IN, -1, out_channels)
            if needs_weight and of_kernels is None:
                of_kernels = torch.bmm(of_products.transpose(1, 2), kept[index])
            elif of_kernels is not None:
                of_kernels.baddbmm_(of_products.transpose(1, 2), kept[index])
            if of_inputs is not None:
                of_inputs.add(group, _both_axes(_INPUT_BACKWARD, torch.bmm(of_products, kernels)))
        return (
            None if of_inputs is None else of_inputs.result(),
            None if of_kernels is None else _gradient_of_weights(weight, of_kernels),
            of_outputs.sum((0, 1, 2)) if ctx.has_bias and needs_bias else None,
            None,
        )


def _both_axes(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Return `matrix @ tile @ matrix.T` of tiles, of which `tiles` has each position in turn: [r * r, columns]."""
    rows, size = matrix.shape
    first = matrix.mm(tiles.reshape(size, -1)).view(rows, size, -1)
    return torch.bmm(matrix.expand(rows, rows, size), first)


def _kernels(weight: torch.Tensor) -> torch.Tensor:
    """Return the transformed weights [36, o, c]."""
    out_channels, channels = weight.shape[:2]
    windows = weight.permute(0, 2, 3, 1).reshape(out_channels, 9, channels)
    return torch.matmul(_KERNELS, windows).transpose(0, 1)


def _gradient_of_weights(weight: torch.Tensor, of_kernels: torch.Tensor) -> Optional[torch.Tensor]:
    """Return the gradient of the weights; None if it was added to their `grad`."""
    out_channels, channels = weight.shape[:2]
    by_tap = _KERNELS.t().mm(of_kernels.view(_IN * _IN, -1)).view(3, 3, out_channels, channels)
    if accumulates(weight) and weight.grad is not None:
        weight.grad.permute(2, 3, 0, 1).add_(by_tap)
        return None
    result = by_tap.permute(2, 0, 1, 3).contiguous().permute(0, 3, 1, 2)
    if accumulates(weight):
        weight.grad = result
        return None
    return result


def _input_tiles(images: torch.Tensor, tiling: _Tiling) -> torch.Tensor:
    """Return the input tiles of images [n, h, w, c]: [6, 6, n, rows, columns, c]."""
    after_rows, after_columns = tiling.beyond
    padded = functional.pad(images, (0, 0, 1, 1 + after_columns, 1, 1 + after_rows))
    sample, row, column, _ = padded.stride()
    shape = (_IN, _IN, images.shape[0], tiling.rows, tiling.columns, images.shape[3])
    return padded.as_strided(shape, (row, column, sample, _OUT * row, _OUT * column, 1))


def _output_tiles(outputs: torch.Tensor, tiling: _Tiling) -> torch.Tensor:
    """Return the output tiles of a tensor of shape [n, h, w, o]: [4, 4, n, rows, columns, o]."""
    after_rows, after_columns = tiling.beyond
    if after_rows or after_columns:
        outputs = functional.pad(outputs, (0, 0, 0, after_columns, 0, after_rows))
    by_tile = outputs.view(outputs.shape[0], tiling.rows, _OUT, tiling.columns, _OUT, -1)
    return by_tile.permute(2, 4, 0, 1, 3, 5)


class _PaddedGradient:
    """The gradient of the inputs with their padding, to which overlapping input tiles are added."""

    def __init__(self, like: torch.Tensor, tiling: _Tiling, channels: int) -> None:
        self._tiling = tiling
        shape = (tiling.samples, tiling.rows + 1, _OUT, tiling.columns + 1, _OUT, channels)
        self._tiles = like.new_zeros(shape)

    def add(self, group: slice, tiles: torch.Tensor) -> None:
        """Set the gradient of a group of images from that of their input tiles."""
        rows, columns = self._tiling.rows, self._tiling.columns
        total = self._tiles[group].permute(2, 4, 0, 1, 3, 5)
        each = tiles.view(_IN, _IN, total.shape[2], rows, columns, -1)
        over = _IN - _OUT  # what a tile has in common with the next one
        total[:, :, :, :rows, :columns].copy_(each[:_OUT, :_OUT])
        total[:over, :, :, 1:, :columns] += each[_OUT:, :_OUT]
        total[:, :over, :, :rows, 1:] += each[:_OUT, _OUT:]
        total[:over, :over, :, 1:, 1:] += each[_OUT:, _OUT:]

    def result(self) -> torch.Tensor:
        """Return the gradient of the inputs: [n, c, h, w], channels_last."""
        tiling = self._tiling
        padded = self._tiles.view(tiling.samples, _OUT * (tiling.rows + 1), _OUT * (tiling.columns + 1), -1)
        return padded[:, 1 : 1 + tiling.height, 1 : 1 + tiling.width].contiguous().permute(0, 3, 1, 2)
