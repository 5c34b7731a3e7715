"""The operators of poptorch-experimental-addons, which bess-kge uses, and the patterns of both.

Written from the documentation of the Python functions that call them. As compiled, half tensors are computed with sums
in float32.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence

import torch

from poptorch.custom_operators.registry import built_in_emulation, custom_pattern

_HALF_MANTISSA_BITS = 10
_HALF_LEAST_EXPONENT = -14  # of normal numbers

# They remove what the operators of the emulation do not compute in the first place.
custom_pattern("AutogradProxyOpPattern")
custom_pattern("RemoveAllReducePattern")  # of bess-kge


@built_in_emulation("AutogradProxy")
def autograd_proxy(forward: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
    """Return the first tensor; the gradient is that of the second."""
    return _AutogradProxy.apply(forward, proxy)  # type: ignore[no-any-return, no-untyped-call]


class _AutogradProxy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: torch.Tensor, proxy: torch.Tensor) -> torch.Tensor:
        return forward.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


@built_in_emulation("L1Distance")
def l1_distance(a: torch.Tensor, b: torch.Tensor, root_path: str = "") -> torch.Tensor:
    """Return the sums of the absolute differences of each row of a and each row of b."""
    return _distance(a, b, 1.0)


@built_in_emulation("L2Distance")
def l2_distance(a: torch.Tensor, b: torch.Tensor, root_path: str = "") -> torch.Tensor:
    """Return the Euclidean distances of each row of a and each row of b; equal rows have the gradient 0."""
    return _distance(a, b, 2.0)


def _distance(a: torch.Tensor, b: torch.Tensor, norm: float) -> torch.Tensor:
    # By products of matrices, small distances would be those of their rounding errors.
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(a.float(), b.float(), norm, compute_mode=exact).to(a.dtype)


@built_in_emulation("SimulatedQuant")
def simulated_quantisation(  # the operator's attributes
    x: torch.Tensor,
    exponent_bits: int,
    mantissa_bits: int,
    rounding: str,
    fwd: int,
    bwd: str,
    root_path: str = "",
) -> torch.Tensor:
    """Round to a floating point format with fewer bits than half, in the forward or the backward pass.

    Args:
        rounding: "nearest", or "stochastic": up or down at random.
        fwd: whether the result is rounded.
        bwd: "quantise" (the gradient is rounded), "ste" (it is passed on) or "stop" (there is none).
    """
    number_format = _Format(exponent_bits, mantissa_bits)
    # Both draws are in the forward pass, so that they depend on the micro-batch only.
    noise = [number_format.noise(x, rounding) if used else None for used in (fwd, bwd == "quantise")]
    source = x.detach() if bwd == "stop" else x
    return _Quantised.apply(source, number_format, *noise)  # type: ignore[no-any-return, no-untyped-call]


class _Format:
    """A floating point format: sign, exponent and mantissa, with subnormal numbers, but no infinity and NaN."""

    def __init__(self, exponent_bits: int, mantissa_bits: int) -> None:
        largest_exponent = 2 ** (exponent_bits - 1) - 1
        self._largest = 2.0**largest_exponent * (2 - 2.0**-mantissa_bits)
        # Aligns the least exponents, so that the subnormal numbers of half are those of the format. Half has no room
        # for those of 5 bits.
        self._scale = max(1.0, 2.0 ** (-_HALF_LEAST_EXPONENT - largest_exponent))
        self._steps = 2 ** (_HALF_MANTISSA_BITS - mantissa_bits)  # of half in one of the format

    def noise(self, x: torch.Tensor, rounding: str) -> torch.Tensor:
        """Return what is added, in steps of half, before the excess bits are cut off."""
        if rounding == "nearest":
            return torch.tensor(float((self._steps - 1) // 2))
        return torch.randint(self._steps, x.shape).float()

    def rounded(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return x in the values of the format."""
        half = x.float().clamp(-self._largest, self._largest).half()
        scaled = (half.float() / self._scale).half().float()
        exponents = (torch.frexp(scaled).exponent - 1).clamp(min=_HALF_LEAST_EXPONENT)
        step = torch.ldexp(torch.ones_like(scaled), exponents - _HALF_MANTISSA_BITS)
        kept = ((scaled.abs() / step + noise) / self._steps).floor() * self._steps
        result: torch.Tensor = scaled.sign() * kept * step * self._scale
        return result.to(x.dtype)


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        number_format: _Format,
        noise: Optional[torch.Tensor],
        gradient_noise: Optional[torch.Tensor],
    ) -> torch.Tensor:
        ctx.number_format, ctx.noise = number_format, gradient_noise
        return x.clone() if noise is None else number_format.rounded(x, noise)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rounded = gradient if ctx.noise is None else ctx.number_format.rounded(gradient, ctx.noise)
        return rounded, None, None, None


@built_in_emulation("StaticSparseMatmul")
def static_sparse_matmul(  # the operator's attributes
    dense: torch.Tensor,
    mode: str,
    n_rows: int,
    n_cols: int,
    block_size: int,
    rows: Sequence[int],
    cols: Sequence[int],
    values: Sequence[float],
) -> torch.Tensor:
    """Return the product of a constant block-sparse matrix and a dense one; it is for inference and has no gradient.

    Args:
        mode: "sparse_dense" or "dense_sparse": the order of the operands.
        rows, cols: the first element of each block.
        values: the elements of the blocks, one block after the other.
    """
    sparse = torch.zeros(n_rows, n_cols)
    blocks = torch.tensor(values).view(-1, block_size, block_size)
    for row, column, block in zip(rows, cols, blocks):
        sparse[row : row + block_size, column : column + block_size] = block
    sparse = sparse.to(dense.dtype).float()  # the values have the dtype of the operand
    operand = dense.detach().float()
    return (sparse @ operand if mode == "sparse_dense" else operand @ sparse).to(dense.dtype)
