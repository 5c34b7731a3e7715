"""3x3 convolutions of channels_last tensors by Winograd's algorithm, F(4x4, 3x3), in matrix products of torch.

The output is computed in tiles of 4x4. Input tiles (6x6), weights (3x3) and output tiles are transformed by small
matrices to 36 points, at each of which the convolution is one matrix product over the channels: a quarter of the
multiplications of the sum over the window. In float32 the result differs from the exact one by about 2e-6 of its norm,
torch's by 5e-7. Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", 2016, has the matrices.

The images are processed in groups whose tiles fit into a core's cache. Groups depend on shapes only, so every replica
computes the same bits.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from poptorch.device.kernels import accumulates

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


def is_faster(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `convolve` is faster than torch's kernel, for a 3x3 kernel with stride 1 and padding 1."""
    samples, channels, height, width = inputs.shape
    tiling = _Tiling(samples, height, width)
    return (
        min(channels, weight.shape[0]) >= _LEAST_CHANNELS
        and samples * tiling.tiles >= _LEAST_TILES
        and tiling.waste <= _MOST_WASTE
    )


def convolve(inputs: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
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
            None if of_kernels is None else _weight_gradient(weight, of_kernels),
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


def _weight_gradient(weight: torch.Tensor, of_kernels: torch.Tensor) -> Optional[torch.Tensor]:
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
